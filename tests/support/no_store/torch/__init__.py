"""A stand-in for torch where nobody asks its store: the real one costs two seconds to import."""

"""What runs in or beside training scripts; the only package that imports torch."""

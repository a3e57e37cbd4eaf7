"""What scripts/docs lays out: the documents as they are, and pages that are made from the code."""

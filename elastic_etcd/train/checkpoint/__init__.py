"""Checkpoints of any format in the memory of the nodes."""

"""Which rank trains on which sample."""

"""Programs that run as children, each by its path: their interpreter need not have this package."""

"""A job that is followed on a screen and in a browser."""

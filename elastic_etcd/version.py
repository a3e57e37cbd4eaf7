"""The version, in a module of its own: a stray folder of our name must not hide it."""

__version__ = "0.1.0"

"""The rules: pure functions on immutable values; no clock, no I/O, no library but msgspec."""

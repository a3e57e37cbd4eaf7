"""The rules: pure functions on immutable values, standard library only, no clock, no I/O."""

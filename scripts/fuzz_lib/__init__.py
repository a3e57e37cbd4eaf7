"""Fuzzing: see scripts/fuzz."""

"""Commands that a framework asks for."""

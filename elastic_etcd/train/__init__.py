"""The parts that training scripts import, and that run beside them: they are loaded with torch."""

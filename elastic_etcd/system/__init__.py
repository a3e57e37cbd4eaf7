"""Processes and the kernel."""

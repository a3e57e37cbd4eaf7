"""The messages between an agent and its children."""

"""The agent of one node: it starts, watches and stops the workers, with their output."""

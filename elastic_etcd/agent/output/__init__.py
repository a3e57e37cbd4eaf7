"""The workers' output and the agent's log."""

"""All that looks at an agent's life and decides nothing."""

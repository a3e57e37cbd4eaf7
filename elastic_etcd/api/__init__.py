"""`elastic_launch` and the agent that is its child."""

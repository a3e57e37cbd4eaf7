"""One node of a job: the agent, its worker processes, their logs."""

"""Command-line tools around a job."""

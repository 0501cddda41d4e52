"""One file a job: its stages in order."""

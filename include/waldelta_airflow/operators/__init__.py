"""The operators: run a job or a stage of it, and report what a run changed."""

"""Ways to start a job from a task (child process, fork server, spark-submit), and its result."""

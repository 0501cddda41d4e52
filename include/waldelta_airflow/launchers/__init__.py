"""How a task starts a job: a child process, the fork server, spark-submit; and what the job
reported.
"""

"""Job sync: copies the initial snapshot of tables.

Stages, in order: sync, check, report. They stand in ``waldelta.jobs.sync``.

::

    spark-submit spark_jobs/sync.py FILE [--tables TABLES] [--reason TEXT]
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("sync")

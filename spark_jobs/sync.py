"""Job sync: copies the initial snapshot of tables.

Stages, in order: sync, check, report. They are in ``waldelta.jobs.sync``.

::

    spark-submit spark_jobs/sync.py FILE [OPTIONS]

``python -m spark_jobs sync --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("sync")

"""Job resync: recreates a lost slot and repairs the targets by the rows that differ.

Stages, in order: resync, check, report. They are in ``waldelta.jobs.sync``.

::

    spark-submit spark_jobs/resync.py FILE [OPTIONS]

``python -m spark_jobs resync --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("resync")

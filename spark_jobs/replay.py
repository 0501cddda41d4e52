"""Job replay: derives the rows that the runs of an interval changed from the change log again.

Stages, in order: land, apply, check, report. They are in ``waldelta.jobs.replay``.

::

    spark-submit spark_jobs/replay.py FILE [OPTIONS]

``python -m spark_jobs replay --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("replay")

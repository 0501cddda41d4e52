"""Job consume: lands the slot's changes, applies them to the targets, checks them and reports.

Stages, in order: land, apply, check, report. They are in ``waldelta.jobs.consume``.

::

    spark-submit spark_jobs/consume.py FILE [OPTIONS]

``python -m spark_jobs consume --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("consume")

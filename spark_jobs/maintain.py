"""Job maintain: compacts targets, drops what is older than the promised retention, prunes
bookkeeping and reports.

Stages, in order: targets, leftovers, change_log, ledger, check, reports. They are in
``waldelta.jobs.maintain``.

::

    spark-submit spark_jobs/maintain.py FILE [OPTIONS]

``python -m spark_jobs maintain --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("maintain")

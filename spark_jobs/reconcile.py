"""Job reconcile: compares targets with a snapshot of the source; with --repair, corrects the rows
that differ.

Stages, in order: reconcile, report. They are in ``waldelta.jobs.reconcile``.

::

    spark-submit spark_jobs/reconcile.py FILE [OPTIONS]

``python -m spark_jobs reconcile --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("reconcile")

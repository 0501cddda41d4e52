"""Job quarantine: lists quarantined rows, or carries out an operator's decisions on them.

A decision's stages, in order: retry or accept, check. They are in
``waldelta.jobs.retry_quarantined``.

::

    spark-submit spark_jobs/quarantine.py FILE [OPTIONS]

``python -m spark_jobs quarantine --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("quarantine")

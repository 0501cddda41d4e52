"""Job validate: checks every target's expectations now.

Stages, in order: check. They are in ``waldelta.jobs.validate``.

::

    spark-submit spark_jobs/validate.py FILE [OPTIONS]

``python -m spark_jobs validate --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("validate")

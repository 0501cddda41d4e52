"""Job check: reports whether setup would succeed, and what it would do; changes nothing.

The checks are in ``waldelta.stages.setup.preflight``.

::

    spark-submit spark_jobs/check.py FILE [OPTIONS]

``python -m spark_jobs check --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("check")

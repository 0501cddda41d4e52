"""Job decide: carries out an operator's decision on rows, tables and messages that wait.

Stages, in order: the action; after retry and accept, check. They are in ``waldelta.jobs.decide``.

::

    spark-submit spark_jobs/decide.py FILE ACTION [OPTIONS]

``python -m spark_jobs decide --help`` lists actions and options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("decide")

"""The application of spark-submit for every verb.

::

    spark-submit waldelta_job.py VERB FILE [OPTIONS]
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted()

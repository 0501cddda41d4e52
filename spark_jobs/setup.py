"""Job setup: creates or alters the publications and the slot, once preflight found no problem.

The stage is in ``waldelta.stages.setup``.

::

    spark-submit spark_jobs/setup.py FILE [OPTIONS]

``python -m spark_jobs setup --help`` lists the options.
"""

from waldelta.cli.command_line import run_submitted

if __name__ == "__main__":
    run_submitted("setup")

"""The one application that spark-submit runs; takes the same arguments as ``python -m spark_jobs``."""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.setdefault("WALDELTA_LAUNCHER", "SPARK_SUBMIT")
    from waldelta.cli.command_line import run_and_exit

    run_and_exit()

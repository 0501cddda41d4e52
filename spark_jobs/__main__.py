"""``python -m spark_jobs VERB FILE``."""

from __future__ import annotations

from spark_jobs.command_line import run_and_exit

if __name__ == "__main__":
    run_and_exit()

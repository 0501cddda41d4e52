"""``python -m spark_jobs VERB FILE``."""

from __future__ import annotations

import gc
import signal

# Until the verb begins, Ctrl-C ends the process without a stack trace of imports.
signal.signal(signal.SIGINT, signal.SIG_DFL)
# The imports create half a million objects, none of them garbage.
gc.set_threshold(100_000, 50, 50)

from waldelta.cli.command_line import run_and_exit  # noqa: E402

if __name__ == "__main__":
    run_and_exit()

"""``python -m spark_jobs VERB FILE``."""

from __future__ import annotations

import gc
import logging
import os
import sys

# Half a million objects come with the imports, none of them garbage.
gc.set_threshold(100_000, 50, 50)

from spark_jobs.command_line import main  # noqa: E402

if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed and written. The ordinary way out takes two thousand modules apart, a third of a second for each
    # task, and waits for whatever thread a library has left behind.
    os._exit(code)

"""``python -m waldelta VERB FILE``, which the command ``waldelta`` runs, too."""

from __future__ import annotations

import gc
import signal
from typing import NoReturn


def _load_arrow() -> None:
    """Load Arrow without pandas, which it looks for once, at its first value.

    pandas is a quarter of a small run's imports, and no value that we give to Arrow is its own.
    Others import it as ever: Spark, Great Expectations.
    """
    from waldelta.hidden_modules import hidden

    with hidden("pandas"):
        import pyarrow.dataset

        pyarrow.array([None])


def main() -> NoReturn:
    """Run the process's arguments as a command line, and exit with its code."""
    # Until the verb begins, Ctrl-C ends the process without a stack trace of imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The imports and a small run keep 300,000 objects, none of them garbage.
    gc.set_threshold(500_000, 10, 50)
    try:
        _load_arrow()
        from waldelta.cli.command_line import run_and_exit
    except ImportError as err:
        from waldelta.cli.doctor import explain_import_error

        explain_import_error(err)
        raise SystemExit(1) from None
    run_and_exit()


if __name__ == "__main__":
    main()

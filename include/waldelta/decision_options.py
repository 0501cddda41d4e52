"""What an operator can decide on rows in quarantine, stopped tables and messages that can't be
read.

The command line's options, the param of the ``_quarantine`` DAG and the forms of the pages have
these names.
"""

from __future__ import annotations

from typing import Final

DECISIONS: Final = ("retry", "accept", "discard", "release", "skip")

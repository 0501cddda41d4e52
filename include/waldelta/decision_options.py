"""An operator's decisions on quarantined rows, stopped tables and unreadable messages.

The command line's options, the param of the ``_quarantine`` DAG and the pages' forms use these
names.
"""

from __future__ import annotations

from typing import Final

DECISIONS: Final = ("retry", "accept", "discard", "release", "skip")

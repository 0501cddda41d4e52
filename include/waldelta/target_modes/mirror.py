"""Mode ``mirror``: the rows that the source has now.

Its net changes are merged without a statement of the mode.
"""

from __future__ import annotations

from waldelta.target_modes.target_mode import Feature, Fold, TargetMode

MIRROR = TargetMode(
    name="mirror",
    summary="keeps the source's rows",
    fold=Fold.NET_CHANGES,
    features=frozenset(Feature),
)

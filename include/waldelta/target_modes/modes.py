"""The target modes by name: a new mode is a file of its own and an entry here."""

from __future__ import annotations

from waldelta.errors import StateError
from waldelta.target_modes.changelog import CHANGELOG
from waldelta.target_modes.history import HISTORY
from waldelta.target_modes.mirror import MIRROR
from waldelta.target_modes.soft_delete import SOFT_DELETE
from waldelta.target_modes.target_mode import TargetMode

MODES: dict[str, TargetMode] = {
    mode.name: mode for mode in (MIRROR, SOFT_DELETE, HISTORY, CHANGELOG)
}


def named_mode(name: str | None) -> TargetMode:
    """Returns the mode of this name; None is a mirror, whose mode the ledger doesn't store.

    Raises StateError for a mode that the ledger has from another version.
    """
    if (mode := MODES.get(name or MIRROR.name)) is None:
        raise StateError(
            f"the ledger has a target with mode {name!r}, which this version of waldelta doesn't"
            " know: use the version that wrote it"
        )
    return mode


def mode_column_names() -> list[str]:
    """Returns the names of the columns that modes add to targets, of all modes.

    >>> mode_column_names()[:2]
    ['_wd_deleted', '_wd_deleted_at']
    """
    return [name for mode in MODES.values() for name in mode.columns({"key": ""})]

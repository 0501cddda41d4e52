"""Whom files are for."""

from __future__ import annotations

import stat
from pathlib import Path


def open_to_others(folder: Path) -> list[str]:
    """Whatever of a folder, itself included, grants anything to group or others."""
    return [
        str(path)
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]

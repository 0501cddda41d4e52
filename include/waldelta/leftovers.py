"""Leftovers: staged changes in ``_waldelta/staging`` that a killed run never merged nor removed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from waldelta.lake import bookkeeping_uri, encode_segment, list_folders

STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder of staged changes, and the tables one of which it was staged for: names are cut, so perhaps several."""

    uri: str
    tables: tuple[str, ...]


def staging_folder(root: str, table_name: str, generation: int, batch: int, run_id: str) -> str:
    """URI of the folder for the changes of one target up to one batch; a name of its own for every ``run_id``, and so for every attempt."""
    # Any run id, however long, gives a short folder name.
    run = hashlib.sha256(run_id.encode()).hexdigest()[:12]
    return f"{bookkeeping_uri(root, STAGING)}/{_prefix(table_name)}{generation}-{batch}-{run}"


def find_leftovers(root: str, tables: Iterable[str], before: datetime) -> list[Leftover]:
    """Folders in which nothing was written since ``before``.

    Whoever removes one holds the locks of its tables: a run at work on one of them may still read it.
    """
    names = sorted(tables)
    folders = list_folders(bookkeeping_uri(root, STAGING))
    return [
        Leftover(uri, tuple(name for name in names if uri.rsplit("/", 1)[1].startswith(_prefix(name))))
        for uri, written in sorted(folders.items())
        if written < before
    ]


def _prefix(table_name: str) -> str:
    return encode_segment(f"{table_name[:60]}-")

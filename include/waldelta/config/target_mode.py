"""Target modes: what a target keeps of rows that the source changed or deleted, and the metadata
columns for it.

``mirror`` keeps nothing, ``soft_delete`` the last state of deleted rows. ``history`` keeps every
state at the end of a transaction (a slowly changing dimension of type 2), ``changelog`` every
change. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from waldelta.errors import ModeRefused
from waldelta.metadata_columns import (
    BEFORE,
    DELETED,
    DELETED_AT,
    OP,
    SEQ,
    UNCHANGED,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_LSN,
    XID,
)
from waldelta.spark_sql import quote

TargetMode = Literal["mirror", "soft_delete", "history", "changelog"]
MIRROR: TargetMode = "mirror"
SOFT_DELETE: TargetMode = "soft_delete"
HISTORY: TargetMode = "history"
CHANGELOG: TargetMode = "changelog"

_COLUMNS: Mapping[TargetMode, Mapping[str, str]] = {
    MIRROR: {},
    SOFT_DELETE: {DELETED: "boolean", DELETED_AT: "timestamp"},
    HISTORY: {
        VALID_FROM: "timestamp",
        VALID_TO: "timestamp",
        VALID_FROM_LSN: "bigint",
        VALID_TO_LSN: "bigint",
    },
    CHANGELOG: {OP: "string", SEQ: "bigint", XID: "bigint", UNCHANGED: "array<string>"},
}


def mode_columns(mode: TargetMode, key: Mapping[str, str]) -> dict[str, str]:
    """Returns the columns that this mode adds to a mirror's, with Spark types; ``key`` are key
    columns.

    >>> mode_columns("soft_delete", {"id": "int"})
    {'_wd_deleted': 'boolean', '_wd_deleted_at': 'timestamp'}
    """
    columns = dict(_COLUMNS[mode])
    if mode == CHANGELOG and key:
        fields = ", ".join(f"{quote(name)}: {kind}" for name, kind in key.items())
        columns[BEFORE] = f"struct<{fields}>"
    return columns


def check_key(mode: TargetMode, table: str, key: Sequence[str]) -> None:
    """Raise ModeRefused when this mode needs a key that the table lacks."""
    if mode in (SOFT_DELETE, HISTORY) and not key:
        raise ModeRefused(
            f"{table} has no key, so versions of its rows can't be told apart: mode {mode} needs a"
            " primary key or a replica identity; without one write mode: changelog or mirror"
        )


def check_change(table: str, held: str | None, wanted: TargetMode) -> None:
    """Raise ModeRefused when another mode would lose what the target has kept.

    A mirror has kept nothing.

    >>> check_change("public.t", None, "history")
    """
    if held not in (None, MIRROR, wanted):
        raise ModeRefused(
            f"{table} has mode {held} in the lake, and the pipeline file says {wanted}, which"
            f" would lose what it keeps: write mode: {held} again, or add a target of another name"
            f" (from: {table}), or move its folder away and sync it"
        )


def check_mirror(verb: str, table: str, mode: TargetMode, remedy: str) -> None:
    """Raise ModeRefused for a verb that would overwrite what a mode keeps."""
    if mode != MIRROR:
        raise ModeRefused(
            f"{table} has mode {mode}, so {verb} would overwrite rows that it keeps: {remedy}"
        )

"""Finds, from the source's catalogs alone, ALTERs that changed rows' values or texts without
sending the rows.

``alter column … type … using`` to the column's own type leaves no trace in the stream. Neither does
a volatile default that was dropped again. Both write the table into a new file and replace its
columns' rows of pg_attribute. VACUUM FULL, CLUSTER, TRUNCATE, SET TABLESPACE and the like only make
a new file. GRANT, SET STATISTICS, SET DEFAULT, RENAME and NOT NULL only replace a row of
pg_attribute. So values may have changed where both are new.

Two cases need care. Freezing keeps xmin as it is. Every rewrite of a table also fills in the values
that its old rows showed (attmissingval), which replaces the pg_attribute rows of those columns.
ALTER TYPE also recreates the column's default, so a default that keeps its oid rules out ALTER
TYPE.

``alter type … rename value`` of an enum, an attribute added to or dropped from a composite type,
and the rename of an object that a value names (regclass and its kind), write no row at all: they
change the text of existing rows. So does the drop of such an object, whose oid is printed from then
on. A label added to an enum changes none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import AttributeState, StorageState


def rewritten(then: StorageState | None, now: StorageState | None) -> frozenset[int]:
    """Return the numbers of columns, new ones included, whose values may have changed unsent since
    ``then``.

    There are none when no leaf has another file; leaves that came or went don't count. There are
    none either when ``then`` or ``now`` isn't known.
    """
    if then is None or now is None:
        return frozenset()
    files = {file.oid: file.relfilenode for file in then.files}
    if all(files.get(file.oid, file.relfilenode) == file.relfilenode for file in now.files):
        return frozenset()
    before = {attribute.attnum: attribute for attribute in then.attributes}
    return frozenset(a.attnum for a in now.attributes if not _is_same(before.get(a.attnum), a))


def relabelled(then: StorageState | None, now: StorageState | None) -> dict[int, set[str]]:
    """Return the labels of ``then`` that the catalogs have otherwise now, by column number.

    The column's type was altered, or an object that its values may name was renamed or dropped.
    """
    if then is None or now is None:
        return {}
    current, columns = set(now.labels), {attribute.attnum for attribute in now.attributes}
    outdated: dict[int, set[str]] = {}
    for label in then.labels:
        if label.attnum in columns and label not in current:
            outdated.setdefault(label.attnum, set()).add(label.label)
    return outdated


def unsent_changes(
    state: TableState, now: StorageState | None, outdated: Collection[int]
) -> list[str]:
    """Describe what happened to a target's columns that may no longer hold what the source has.

    ``outdated``: see waldelta.pipeline.drift.outdated_labels.
    """
    changes = [
        (
            rewritten(state.storage, now),
            "ALTER TABLE rewrote {columns}, and PostgreSQL doesn't replicate rewrites",
        ),
        (
            outdated,
            (
                "the catalogs changed the values of {columns} (ALTER TYPE, or an object that they"
                " name was renamed or dropped), and PostgreSQL doesn't replicate that"
            ),
        ),
    ]
    named = [
        ([c.name for c in state.columns if c.attnum in numbers], text) for numbers, text in changes
    ]
    return [text.format(columns=_columns(names)) for names, text in named if names]


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"


def to_record(
    state: TableState,
    now: StorageState | None,
    outdated: Collection[int],
    *,
    renew: bool = False,
) -> TableState | None:
    """Return the state with the current files and columns, when they differ and need no new copy;
    else None.

    While columns that the target doesn't have yet may have come with values, the old files and
    columns stay: they are needed when the first rows with these columns are applied. The list of
    leaves is updated all the same, because leaves that came or went have been reported. With
    ``renew``, the old ones are recorded as of now.
    """
    then = state.storage
    if now is None:
        return None
    if rewritten(then, now) or outdated:
        if then is None:
            return None
        held = {file.oid: file.relfilenode for file in then.files}
        files = [
            replace(file, relfilenode=held.get(file.oid, file.relfilenode)) for file in now.files
        ]
        now = replace(then, files=files, as_of=now.as_of if renew else then.as_of)
    return replace(state, storage=now) if now != then or renew else None


def _is_same(before: AttributeState | None, after: AttributeState) -> bool:
    if before is None:
        return False
    filled = before.has_missing and not after.has_missing
    return before.xmin == after.xmin or (
        filled and before.default_oid is not None and before.default_oid == after.default_oid
    )

"""Rewrites: ALTERs that gave rows other values, or other texts, without sending them, told by the
source's catalogs alone.

``alter column … type … using`` to the type that the column has leaves no trace in the stream, nor
does a volatile default that was dropped again. Both write the table into a new file and its
columns' rows of pg_attribute anew; VACUUM FULL, CLUSTER, TRUNCATE, SET TABLESPACE and the like give
a new file only, and GRANT, SET STATISTICS, SET DEFAULT, RENAME or NOT NULL only a new row of
pg_attribute. So values may have changed where both did.

Two things take care. Freezing leaves xmin as it is. And whatever writes a table anew fills in the
values that its old rows showed (attmissingval), which touches those columns too; ALTER TYPE also
makes the column's default anew, so that a default with its old oid says that it was something else.

``alter type … rename value`` of an enum, and an attribute added to or dropped from a composite
type, write no row at all: they change what rows that exist print as. A label added to an enum
changes none.
"""

from __future__ import annotations

from dataclasses import replace

from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import AttributeState, StorageState


def rewritten(then: StorageState | None, now: StorageState | None) -> frozenset[int]:
    """Numbers of the columns, new ones included, whose values may be others than the stream told
    since ``then``.

    Columns without a change of any leaf's file aren't among them; leaves that came or went don't
    count. Without knowledge of then or now, none are.
    """
    if then is None or now is None:
        return frozenset()
    files = {file.oid: file.relfilenode for file in then.files}
    if all(files.get(file.oid, file.relfilenode) == file.relfilenode for file in now.files):
        return frozenset()
    before = {attribute.attnum: attribute for attribute in then.attributes}
    return frozenset(a.attnum for a in now.attributes if not _is_same(before.get(a.attnum), a))


def relabelled(then: StorageState | None, now: StorageState | None) -> frozenset[int]:
    """Numbers of the columns whose rows print otherwise than they did ``then``, because their type
    was altered.
    """
    if then is None or now is None:
        return frozenset()
    before = {(label.attnum, label.oid): label.label for label in then.labels}
    return frozenset(
        label.attnum
        for label in now.labels
        if before.get((label.attnum, label.oid), label.label) != label.label
    )


def unsent_changes(state: TableState, now: StorageState | None) -> list[str]:
    """What happened to a target's columns that no longer hold what the source has, as far as
    anybody can tell.
    """
    told = [
        (
            rewritten(state.storage, now),
            "an ALTER TABLE wrote its rows anew without sending them, perhaps with other values",
        ),
        (
            relabelled(state.storage, now),
            "an ALTER TYPE changed what its rows show without sending them",
        ),
    ]
    named = [
        ([c.name for c in state.columns if c.attnum in numbers], what) for numbers, what in told
    ]
    return [f"{what} ({', '.join(names)})" for names, what in named if names]


def to_record(
    state: TableState, now: StorageState | None, *, renew: bool = False
) -> TableState | None:
    """The state with today's files and columns, when they are others and that needs no new copy;
    else None.

    While columns that the target doesn't have yet may have come with values, the old ones stay:
    they tell when the first rows with these columns are applied. Which leaves there are is entered
    all the same, since what came or went has been told then. With ``renew``, the old ones are
    entered as of today.
    """
    then = state.storage
    if now is None:
        return None
    if rewritten(then, now) or relabelled(then, now):
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

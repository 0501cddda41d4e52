"""What a target holds of its source's rows and columns, in words: for pages and for ``status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import COPYING, FAILED, NEEDS_SYNC, REMOVED, SYNCED
from waldelta.postgres.publication_membership import from_texts, rules
from waldelta.quantities import counted
from waldelta.target_modes import MIRROR

# What a target misses, or keeps, when an operation isn't published.
_NOT_PUBLISHED = {
    "insert": "inserts aren't published: rows inserted since its copy are missing",
    "update": "updates aren't published: rows stay as they were inserted or copied",
    "delete": "deletes aren't published: rows that the source deleted stay",
    "truncate": "truncates aren't published: rows that the source truncated stay",
}
_UNFINISHED = {
    COPYING: "its copy isn't complete",
    FAILED: "its copy failed",
    NEEDS_SYNC: "it waits for a new copy",
    REMOVED: "it is no longer published",
}


@dataclass(frozen=True, slots=True)
class TargetContent:
    """``limits`` are all reasons known to the ledger why a target's rows or columns aren't those of
    its source.
    """

    limits: tuple[str, ...] = ()
    is_publishing_known: bool = True

    @property
    def summary(self) -> str:
        """Returns what the target holds, once the changes that have landed are applied.

        >>> TargetContent().summary
        'all rows and columns of the source'
        """
        if self.limits:
            return "; ".join(self.limits)
        return (
            "all rows and columns of the source"
            if self.is_publishing_known
            else "what its publications send"
        )


def read_content(state: TableState, quarantined: int = 0, discarded: int = 0) -> TargetContent:
    """Returns what a target holds by its latest state and the numbers of rows kept out of it."""
    kept_out = [
        *([f"{counted(quarantined, 'row')} in quarantine"] if quarantined else []),
        *([counted(discarded, "discarded row")] if discarded else []),
    ]
    limits = [*_limits(state), *([f"without {' and '.join(kept_out)}"] if kept_out else [])]
    return TargetContent(tuple(limits), bool(state.publishes))


def content_label(state: TableState) -> str:
    """Returns in a few words how a target differs from a mirror of all rows; empty for one.

    Needs the state's mode, ``copy_skipped``, ``publishes`` and filters only.
    """
    missing = [f"{operation}s" for operation in _missing(state)]
    parts = [
        *([str(state.kept_as)] if state.kept_as != MIRROR else []),
        *(["without a copy"] if state.copy_skipped else []),
        *(["filtered"] if state.row_filter or state.target_filter else []),
        *([f"no {', '.join(missing)}"] if missing else []),
    ]
    return ", ".join(parts)


def _limits(state: TableState) -> Iterator[str]:
    if state.status != SYNCED:
        yield _UNFINISHED[state.status]
    if state.kept_as != MIRROR:
        yield f"mode {state.kept_as}: {state.kept_as.summary}"
    if state.copy_skipped:
        yield "no initial copy: earlier rows of the source are missing"
    if filters := [text for text in (state.row_filter, state.target_filter) if text]:
        yield f"only rows where {' and '.join(filters)}"
    if len(set(rules(from_texts(state.entries)).values())) > 1:
        yield "its publications send some operations by other filters"
    if state.later_filters:
        yield "its publications sent other rows at times since its copy"
    if state.unmended_leaves:
        yield f"{counted(len(state.unmended_leaves), 'partition')} added, removed or truncated"
    yield from (_NOT_PUBLISHED[operation] for operation in _missing(state))
    if hidden := _unpublished_columns(state):
        yield f"{counted(hidden, 'column')} of the source not published"


def _missing(state: TableState) -> list[str]:
    """Returns the operations that its publications didn't publish at its copy, or don't now.

    An earlier version didn't record them; then it returns none.
    """
    if not state.publishes:
        return []
    published = set(state.publishes)
    if now := from_texts(state.entries):
        published &= rules(now).keys()
    return [name for name in _NOT_PUBLISHED if name not in published]


def _unpublished_columns(state: TableState) -> int:
    """Returns how many columns the source has at the last check, and the target lacks."""
    held = {column.attnum for column in state.columns}
    unpublished = set(state.unpublished) - held
    if state.storage is not None:
        unpublished &= {attribute.attnum for attribute in state.storage.attributes}
    return len(unpublished)

"""What needs attention: in words, with a severity and the page that shows more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from waldelta.quantities import first_of

AttentionLevel = Literal["failed", "warning"]

# PostgreSQL's ``wal_status`` in words; other states are shown as they are.
SLOT_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {"reserved": "healthy", "extended": "healthy", "unreserved": "about to be lost"}
)
# Stands for tables that an unreadable message doesn't name.
UNNAMED: Final = "any table"
# Kinds that leave it open which rows of the source a target has.
IN_DOUBT: Final = frozenset(
    {
        *("behind", "copied_since", "different", "drift", "external_commits", "never_copied"),
        *("skipped_messages", "stopped", "unpublished"),
    }
)
_MOST_NAMED = 3
_MOST_SHOWN = 600


# Each kind of attention, and what to do about it; texts of the others contain that.
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "behind": "follow the error of the task apply",
        "copied_since": "trigger the DAG _reconcile",
        "copying": "",
        "data_gap": "",
        "different": "revoke the other writer's permission, then run _reconcile with repair",
        "drift": "run _cdc, or copy the table again",
        "external_commits": "revoke the other writer's permission, then run _reconcile",
        "failed_attempt": "",
        "failed_comparison": "the page shows the reason",
        "failed_copy": "correct the cause, which the page shows; runs try again",
        "failed_dag_run": "read its log in Airflow",
        "failed_expectations": "open the report; correct the data or the expectation",
        "failed_maintenance": "",
        "failed_reconciliation": "",
        "failed_run": "",
        "lacks": "",
        "lake": "",
        "needs_copy": "keep the DAG _initial_sync unpaused",
        "never_copied": "",
        "new_tables": "",
        "overdue": "look for an active run, and at the scheduler and the slot's pool",
        "paused": "unpause it, or run teardown",
        "paused_maintenance": "unpause it",
        "paused_reconcile": "unpause it",
        "pipeline_file": "",
        "quarantine": "decide on the rows, on the page",
        "silent_run": "if the task's log doesn't grow, mark the task as failed",
        "skipped_messages": "reconcile the tables",
        "slot": "run the pipeline, or see docs/how-to/emergency.md",
        "source": "",
        "stopped": "release the table, or correct the data or the expectation",
        "unchecked": "clear the run's task check, or run _maintenance",
        "unevaluated_expectations": "correct the expectation file, or sync the target",
        "unpublished": "run _setup, then _initial_sync for these tables",
        "unreadable_messages": "skip them on the page",
        "unused_expectations": "rename the file to schema.table.yml, or remove it",
        "warned_expectations": "read the table's page",
    }
)


@dataclass(frozen=True, slots=True)
class Attention:
    """One thing that needs attention, and where to see it.

    ``kind`` is one of KINDS. ``page`` has the parts of a page's address below the pipeline's own
    page, and is empty for that page. ``anchor`` names a part of the page. Without either there is
    nothing more to see. ``objects`` are the tables concerned, if it is about tables. ``cause`` is
    the class of an error: another one is news.
    """

    severity: AttentionLevel
    kind: str
    text: str
    page: tuple[str, ...] = ()
    anchor: str = ""
    objects: tuple[str, ...] = ()
    cause: str = ""

    def only(self, objects: Sequence[str]) -> Attention:
        """Returns the attention for some of its objects.

        >>> Attention("failed", "stopped", "a, b: stopped", objects=("a", "b")).only(["b"]).text
        'b: stopped'
        """
        text = self.text
        if self.objects:
            text = text.replace(names(self.objects), names(objects), 1)
        return replace(self, objects=tuple(objects), text=text)


def names(found: Sequence[str]) -> str:
    """Returns the first names, and how many more there are.

    >>> names(["a", "b"]), names(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    return first_of(found, _MOST_NAMED)


def on_names(
    severity: AttentionLevel,
    kind: str,
    found: Sequence[str],
    text: str,
    *page: str,
    anchor: str = "",
) -> Iterator[Attention]:
    """Yields attention for a list, unless it is empty: its names replace ``{}`` in ``text``.

    >>> [item.text for item in on_names("failed", "failed_copy", ["a", "b"], "{}: the copy failed")]
    ['a, b: the copy failed']
    """
    if found:
        yield Attention(severity, kind, text.format(names(found)), page, anchor, tuple(found))


def concerning(table: str, items: Iterable[Attention]) -> tuple[Attention, ...]:
    """Returns what is about this table, or about tables that aren't known.

    The number of rows in quarantine is that of all tables, so it is left out.
    """
    return tuple(
        item if UNNAMED in item.objects else item.only([table])
        for item in items
        if not {table, UNNAMED}.isdisjoint(item.objects) and item.kind != "quarantine"
    )


def shortened(message: str, most: int = _MOST_SHOWN) -> str:
    """Returns a message in one line, without its middle if it is long: the remedy is at its end.

    >>> shortened("2 tables not synced:\\n  - a: run setup")
    '2 tables not synced: - a: run setup'
    >>> shortened("the slot is lost: run resync", 20)
    'the slot … un resync'
    """
    line = " ".join(message.split())
    if len(line) <= most:
        return line
    kept = (most - 2) // 2
    return f"{line[:kept].rstrip()} … {line[-kept:].lstrip()}"


def worst_first(found: Iterable[Attention]) -> tuple[Attention, ...]:
    """Returns problems before warnings, each in their order."""
    return tuple(sorted(found, key=lambda item: item.severity != "failed"))

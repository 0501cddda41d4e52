"""What needs attention: in words, with a severity and the page that shows more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
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
    {"behind", "copied_since", "decision", "different", "drift", "never_copied", "unpublished"}
)
_MOST_NAMED = 3
_MOST_SHOWN = 600


AttentionTopic = Literal[
    "Waiting for you",
    "Runs and tasks",
    "Slot and WAL",
    "Tables that don't receive changes",
    "Targets that may differ",
    "Data quality",
]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What the texts of one kind are about, and what to do about them.

    Alerts and docs/how-to/respond-to-alerts.md show ``remedy``; a path in it leads to a page.
    """

    topic: AttentionTopic
    remedy: str


# Each kind of attention; how its texts begin stands where they are made.
KINDS: Final[Mapping[str, AttentionKind]] = MappingProxyType(
    {
        "failed_run": AttentionKind(
            "Runs and tasks", "follow the error on the run's page; the next run continues"
        ),
        "failed_attempt": AttentionKind("Runs and tasks", "wait for the retry, which continues"),
        "failed_dag_run": AttentionKind("Runs and tasks", "read its log in Airflow"),
        "failed_maintenance": AttentionKind(
            "Runs and tasks", "follow the error; after QualityFailed maintenance is complete"
        ),
        "failed_reconciliation": AttentionKind("Runs and tasks", "follow the error"),
        "silent_run": AttentionKind(
            "Runs and tasks", "if the task's log doesn't grow, mark the task as failed"
        ),
        "overdue": AttentionKind(
            "Runs and tasks", "look for an active run, and at the scheduler and the slot's pool"
        ),
        "paused": AttentionKind("Runs and tasks", "unpause it"),
        "overdue_maintenance": AttentionKind(
            "Runs and tasks", "look for an active run of it, and at the scheduler"
        ),
        "overdue_reconcile": AttentionKind(
            "Runs and tasks", "look for an active run of it, and at the scheduler"
        ),
        "paused_maintenance": AttentionKind("Runs and tasks", "unpause it"),
        "paused_reconcile": AttentionKind("Runs and tasks", "unpause it"),
        "lacks": AttentionKind(
            "Runs and tasks",
            "create the pool or connection: docs/how-to/run-in-airflow.md#connections-and-pools",
        ),
        "pipeline_file": AttentionKind("Runs and tasks", "correct the problems listed"),
        "lake": AttentionKind(
            "Runs and tasks",
            "set target.conn_id, or give Airflow's API server the tasks' object store variables",
        ),
        "source": AttentionKind("Runs and tasks", "follow the error"),
        "decision": AttentionKind(
            "Waiting for you", "decide on the page *waiting for you*: docs/how-to/decide.md"
        ),
        "data_gap": AttentionKind(
            "Slot and WAL", "recover the slot: docs/how-to/recover-a-slot.md"
        ),
        "slot": AttentionKind(
            "Slot and WAL",
            "run the DAG that the text names; if the WAL is unread, run _cdc, and more often; if"
            " it has been read, end the oldest transaction that has written:"
            " docs/how-to/emergency.md",
        ),
        "behind": AttentionKind(
            "Tables that don't receive changes", "follow the error of the task apply"
        ),
        "failed_copy": AttentionKind(
            "Tables that don't receive changes",
            "correct the cause, which the page shows; runs try again",
        ),
        "needs_copy": AttentionKind(
            "Tables that don't receive changes",
            "keep the DAG _initial_sync unpaused: the copy is automatic",
        ),
        "copying": AttentionKind(
            "Tables that don't receive changes",
            "keep the DAG _cdc unpaused: it restarts a killed copy",
        ),
        "never_copied": AttentionKind(
            "Tables that don't receive changes", "run _initial_sync for these tables"
        ),
        "unpublished": AttentionKind(
            "Tables that don't receive changes", "run _setup, then _initial_sync for these tables"
        ),
        "new_tables": AttentionKind(
            "Tables that don't receive changes",
            "run _setup, then _initial_sync for these tables; the run's warning says why",
        ),
        "different": AttentionKind(
            "Targets that may differ",
            "revoke the other writer's permission, then run _reconcile with repair:"
            " docs/how-to/reconcile.md#repair",
        ),
        "copied_since": AttentionKind("Targets that may differ", "run _reconcile"),
        "failed_comparison": AttentionKind(
            "Targets that may differ", "correct the cause, which the page shows"
        ),
        "drift": AttentionKind(
            "Targets that may differ",
            "run _reconcile, then _cdc, or copy the table again: docs/how-to/change-a-filter.md",
        ),
        "failed_expectations": AttentionKind(
            "Data quality",
            "look at the rows that fail; correct them at the source, or the expectation in its"
            " file",
        ),
        "warned_expectations": AttentionKind("Data quality", "read the table's page"),
        "unevaluated_expectations": AttentionKind(
            "Data quality", "correct the expectation file, or sync the target"
        ),
        "unchecked": AttentionKind(
            "Data quality", "clear the run's task check, or run _maintenance"
        ),
        "unused_expectations": AttentionKind(
            "Data quality", "rename the file to schema.table.yml, or remove it"
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Attention:
    """One thing that needs attention, and where to see it.

    ``kind`` is one of KINDS. ``page`` has the parts of a page's address below the pipeline's own
    page, and is empty for that page. ``anchor`` names a part of the page. Without either there is
    nothing more to see. ``objects`` are the tables concerned, if it is about tables. ``cause`` is
    the class of an error: another one is news. ``details`` are lines about single objects.
    ``waiting`` is the kind of what to decide on (WAITING_KINDS), if it is of the kind "decision",
    and ``since`` when the first of it began to wait.
    """

    severity: AttentionLevel
    kind: str
    text: str
    page: tuple[str, ...] = ()
    anchor: str = ""
    objects: tuple[str, ...] = ()
    cause: str = ""
    details: tuple[tuple[str, str], ...] = ()
    waiting: str = ""
    since: datetime | None = field(default=None, compare=False)

    def only(self, objects: Sequence[str]) -> Attention:
        """Returns the attention for some of its objects.

        >>> Attention("failed", "stopped", "a, b: stopped", objects=("a", "b")).only(["b"]).text
        'b: stopped'
        """
        text = self.text
        if self.objects:
            text = text.replace(names(self.objects), names(objects), 1)
        details = tuple(detail for detail in self.details if detail[0] in objects)
        return replace(self, objects=tuple(objects), text=text, details=details)


def names(objects: Sequence[str]) -> str:
    """Returns the first names, and how many more there are.

    >>> names(["a", "b"]), names(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    return first_of(objects, _MOST_NAMED)


def on_names(
    severity: AttentionLevel,
    kind: str,
    objects: Sequence[str],
    text: str,
    *page: str,
    anchor: str = "",
) -> Iterator[Attention]:
    """Yields attention for a list, unless it is empty: its names replace ``{}`` in ``text``.

    >>> [item.text for item in on_names("failed", "failed_copy", ["a", "b"], "{}: the copy failed")]
    ['a, b: the copy failed']
    """
    if objects:
        yield Attention(severity, kind, text.format(names(objects)), page, anchor, tuple(objects))


def concerning(table: str, items: Iterable[Attention]) -> tuple[Attention, ...]:
    """Returns what is about this table, or about tables that aren't known."""
    return tuple(
        item if UNNAMED in item.objects else item.only([table])
        for item in items
        if not {table, UNNAMED}.isdisjoint(item.objects)
    )


def shorten(message: str, most: int = _MOST_SHOWN) -> str:
    """Returns a message in one line, without its middle if it is long: the remedy is at its end.

    >>> shorten("2 tables not synced:\\n  - a: run setup")
    '2 tables not synced: - a: run setup'
    >>> shorten("the slot is lost: run resync", 20)
    'the slot … un resync'
    """
    line = " ".join(message.split())
    if len(line) <= most:
        return line
    length = (most - 2) // 2
    return f"{line[:length].rstrip()} … {line[-length:].lstrip()}"


def worst_first(items: Iterable[Attention]) -> tuple[Attention, ...]:
    """Returns problems before warnings, each in their order."""
    return tuple(sorted(items, key=lambda item: item.severity != "failed"))

"""What waits for an operator's decision: its kinds; the actions; and a request for one.

The ledger, the command ``decide``, the ``_decide`` DAG, alerts and pages loop over these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from waldelta.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Action:
    """What an action ``does``, for helps and forms; whether it takes ids, tables or both; and what
    its run ``is doing``.
    """

    does: str
    is_doing: str
    takes: tuple[str, ...] = ("ids", "tables")
    needs_reason: bool = True


ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {
        "retry": Action(
            "read the rows of tables from the source again, and keep out what fails a gate",
            "retrying rows",
            ("tables",),
            needs_reason=False,
        ),
        "accept": Action(
            "read rows from the source again and write them, even if they fail their gate, or"
            " agree to external commits",
            "accepting rows",
        ),
        "discard": Action(
            "leave rows out of their targets, or close skipped messages",
            "discarding rows",
        ),
        "release": Action(
            "apply the landed changes of tables, although a gate stopped these tables",
            "releasing the changes of a stopped table",
            ("tables",),
        ),
        "agree": Action(
            "follow changes of source tables that wait (schema_changes: ask)",
            "recording an agreement",
        ),
        "refuse": Action(
            "keep dropped or retyped columns with their last values, or a table as it is instead of"
            " a new copy",
            "recording a refusal",
        ),
        "skip": Action(
            "let runs go on without messages that can't be read", "skipping messages", ("ids",)
        ),
    }
)

# The kinds as the ledger stores them: a row of a table, a replication protocol message, a table
# that a gate stops.
ROW, MESSAGE, TABLE = "row", "message", "table"
# Changes of a source table: a column that it has dropped, one of another type, and any other change
# that only a new copy follows.
DROPPED_COLUMN, RETYPED_COLUMN, COPY = "dropped_column", "retyped_column", "copy"
# A commit of another program to a target; the table's state has those that wait.
EXTERNAL_COMMIT = "external_commit"


@dataclass(frozen=True, slots=True)
class WaitingKind:
    """One kind of what waits: how the ledger stores it, and what texts and pages say of it.

    ``text`` is said of its tables; ``{}`` is the detail that its reader gives. ``heals`` is whether
    it ends without a person, ``remedy`` what a person may choose, and ``joint`` why the latest run
    succeeded nevertheless. ``label`` names the link to the section ``anchor`` of the page, where a
    person chooses; ``{}`` are the tables concerned. ``stored`` and ``status`` are the ledger's.
    ``buttons`` are the labels of its actions. A kind with ``heads`` has its section from the table
    of these columns, with ``title``, ``about`` and a ``note`` beside the buttons. The ``decided``
    kinds wait for a run only.
    """

    severity: Literal["failed", "warning"]
    text: str
    heals: str
    remedy: str = "nothing"
    joint: str = ""
    label: str = "See what waits"
    anchor: str = ""
    stored: tuple[str, ...] = ()
    status: str = "waiting"
    buttons: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    title: str = ""
    about: str = ""
    note: str = ""
    is_decided: bool = False


# Where several kinds wait in a target, the first of them is what to decide on. Changes that wait as
# rows of the ledger need no more than an entry here and the module that records them.
WAITING_KINDS: Final[Mapping[str, WaitingKind]] = MappingProxyType(
    {
        "gate": WaitingKind(
            "failed",
            "stopped by a gate {}",
            "no: its changes wait",
            "correct the rows at the source, or release the changes as they are",
            "it left out the changes of the stopped table",
            "Decide on the changes of {}",
            "stopped",
            (TABLE,),
            "stopped",
            {"release": "Release"},
        ),
        "message": WaitingKind(
            "failed",
            "message {} can't be read: changes wait",
            "no: changes wait",
            "skip the message, and repair its tables by a reconciliation",
            label="Decide on the message",
            anchor="messages",
            stored=(MESSAGE,),
            buttons={"skip": "Skip selected messages"},
        ),
        "schema_change": WaitingKind(
            "failed",
            "a schema change waits: {}",
            "no: the table's changes wait",
            "agree to the change, or refuse it",
            "it left out the changes of the table that waits",
            "Agree to the change, or refuse it",
            "changes",
            (DROPPED_COLUMN, RETYPED_COLUMN, COPY),
            buttons={"agree": "Agree", "refuse": "Refuse"},
            heads=("table", "change, and what each answer does", "since", "decision"),
            title="Changes of source tables",
            about="With schema_changes: ask, a table waits before it loses a column or is copied"
            " again. Its changes wait in the change log. Each says what both answers do.",
        ),
        "external_commit": WaitingKind(
            "warning",
            "another program wrote to the target",
            "no",
            "compare and repair the rows, or accept them as they are",
            "runs don't read the rows that another program writes",
            "Repair or accept {}",
            "commits",
            (EXTERNAL_COMMIT,),
            buttons={"accept": "Accept as it is"},
            heads=("table", "what", "since"),
            title="External commits",
            about="Another program wrote to these targets, which may differ from their sources."
            " Revoke the program's permission.",
            note="Leaves the rows of the selected commits as the other program wrote them. They may"
            " differ from the source. User and reason are recorded.",
        ),
        "rows": WaitingKind(
            "warning",
            "rows are in quarantine",
            "only where a later change corrects the row; otherwise the rows wait for you",
            "retry, accept or discard the rows",
            "it kept such rows out of the target instead of failing",
            "Decide on the rows of {}",
            "rows",
            (ROW,),
            buttons={
                "retry": "Retry all rows",
                "discard": "Discard selected rows",
                "accept": "Accept selected rows",
            },
        ),
        "skipped": WaitingKind(
            "warning",
            "may miss a change: message {}",
            "no",
            "repair its tables by a reconciliation, or mark the message as resolved",
            label="Decide on the message",
            anchor="messages",
            stored=(MESSAGE,),
            status="skipped",
            buttons={"discard": "Mark selected messages as resolved"},
            is_decided=True,
        ),
        "released": WaitingKind(
            "warning",
            "stopped by a gate {}",
            "yes: the next run merges its changes",
            is_decided=True,
        ),
        "answered": WaitingKind(
            "warning",
            "answered for the next run to follow {}",
            "yes: the next run follows the answer",
            is_decided=True,
        ),
    }
)
# Kinds of the ledger that an operator answers: agrees to, or refuses.
QUESTIONS: Final = tuple(
    stored for kind in WAITING_KINDS.values() if "agree" in kind.buttons for stored in kind.stored
)


def kind_of(stored: str, status: str) -> str:
    """Returns the name of a kind by what the ledger stores, empty for what no longer waits."""
    kinds = WAITING_KINDS.items()
    return next((name for name, of in kinds if stored in of.stored and of.status == status), "")


def actions_of(stored: str, status: str) -> tuple[str, ...]:
    """Returns what an operator may do with what the ledger stores so."""
    kind = kind_of(stored, status)
    return tuple(WAITING_KINDS[kind].buttons) if kind else ()


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One action on what has these ids, or on all of these tables; ``by`` is the operator, None
    for the user of this process.
    """

    action: str
    ids: Collection[str] = ()
    tables: Collection[str] | None = None
    reason: str | None = None
    by: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what no run can carry out."""
        action = ACTIONS[self.action]
        objects = {"ids": self.ids, "tables": self.tables}
        if unused := [name for name in objects if objects[name] and name not in action.takes]:
            raise ConfigError(f"{self.action} takes {action.takes[0]}, not {unused[0]}")
        if action.needs_reason and not any(objects.values()):
            raise ConfigError(
                f"nothing is named to {self.action}: name {' or '.join(action.takes)}"
            )
        if action.needs_reason and not (self.reason or "").strip():
            raise ConfigError(f"{self.action} needs a reason, which the ledger keeps")

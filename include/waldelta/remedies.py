"""A failure as people are told of it: the class of its error, and what to do about it."""

from __future__ import annotations

from waldelta import errors
from waldelta.errors import WaldeltaError

# Every failure of a task, also one without a class: a job that was killed, a time limit.
ANY_ERROR = "any"
ERRORS: dict[str, type[WaldeltaError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, WaldeltaError)
}


def is_kind(name: str, of: str) -> bool:
    """Whether errors of one class are of another, given both names; ``any`` is what all are of.

    >>> is_kind("SlotGap", "SlotError"), is_kind("SlotGap", "LakeError"), is_kind("Killed", "any")
    (True, False, True)
    """
    return of == ANY_ERROR or (
        name in ERRORS and of in ERRORS and issubclass(ERRORS[name], ERRORS[of])
    )


# README's failure table says the same.
REMEDIES: dict[str, str] = {
    "ConfigError": "correct what the message lists; nothing was changed",
    "FilterNotTranslatable": (
        "rewrite the part that the message names (what can be translated: docs/row-filters.md), or"
        " filter in the publication"
    ),
    "SourceUnreachable": (
        "as the message says: check host, port, firewall; end idle connections; wait"
    ),
    "AuthenticationFailed": "correct the Airflow connection, or pg_hba.conf, as the message says",
    "PrivilegeMissing": "run the grant the message names",
    "NameUnreadable": "rename the object that the message names",
    "PreflightFailed": "mend every finding; nothing was changed",
    "NotPrimary": "point it at the primary, or promote this one (docs/failover.md)",
    "NotStandby": "correct source.read_from, or take it out; then resync (docs/standby.md)",
    "LockHeld": "wait, or end that run",
    "TableBusy": "wait for, or end, the sessions listed",
    "TransactionsStillOpen": "end the transactions listed",
    "SnapshotLost": "nothing; that table's copy starts again",
    "SyncFailed": "mend each as listed, run the sync again",
    "SlotMissing": "resync; the first time setup, then initial sync",
    "SlotForeign": "choose another slot name; drop it, once nobody needs it",
    "SlotInUse": "stop that reader",
    "SlotLost": "resync; raise max_slot_wal_keep_size or run more often",
    "PublicationGone": (
        "as the message says: take it out of the file until they are consumed, add its tables to"
        " another publication, or teardown, setup, resync"
    ),
    "SlotUnreadable": (
        "correct the filter or the row for what comes, then resync (how:"
        " docs/operations.md#when-postgresql-cant-decode-a-change)"
    ),
    "SlotGap": "as the message says: find out what did it; resync",
    "SlotStuck": "look at pg_replication_slots and the server's log",
    "SlotCritical": "as the message says, at once: afterwards only a resync helps",
    "PeekTooLarge": "as the message says; a huge transaction comes in one piece",
    "SourceDiskFull": "free the disk that the message names, soon: the server may need it for WAL",
    "NoFreeSlot": "drop unused slots, or raise max_replication_slots; nothing was consumed",
    "StandbyAway": "start it, or let it catch up; or take it out of synchronized_standby_slots",
    "SourceChanged": "docs/failover.md: point the connection back, or resync",
    "PeekTimeout": "look for a huge or very old transaction",
    "ConsumeMismatch": "docs/consume.md; nothing is lost while the slot or its copy is kept",
    "DecodeError": (
        "report it; to go on, skip it: docs/operations.md#a-message-that-cant-be-read by the"
        " command in the error, or sync its table"
    ),
    "TargetNotWritable": (
        "as the message says: space, rights, a file in the way, the object store's answer"
    ),
    "LateWriter": "nothing",
    "ApplyError": "as the message says; changes wait in the change log",
    "StagedLost": (
        "nothing; if it comes again, look at the disk or network file system that the lake is on"
    ),
    "SchemaChanged": "sync that table again: initial sync with tables",
    "NeedsSync": (
        "nothing: the table is copied again, by the run or, when it is large, by _initial_sync"
    ),
    "SparkUnreachable": (
        "as the message says: start the server, correct the address, the token or TLS; nothing was"
        " changed"
    ),
    "StageTimeout": (
        "nothing, if it was slow: the next run goes on; else find what it waits for, or raise the"
        " limit"
    ),
    "QualityFailed": (
        "open the report the log names, those tables have no asset event; where changes wait at a"
        " gate, correct the expectation, or release them (docs/pipeline-file.md#gates)"
    ),
    "TargetDiffers": (
        "reconcile: docs/reconcile.md#repair with --repair, once it is known who wrote there"
    ),
    "StateError": "as the message says",
    "ModeRefused": "as the message says; nothing was changed (docs/history.md)",
}

"""What each error means, what holds after it, what to do about it, and an example message.

Notifiers send the remedies, and docs/reference/errors.md is written from all of it
(``make reference``). Tests hold each example to a message that the code raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from waldelta import errors
from waldelta.errors import WaldeltaError


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One error for its reader.

    ``afterwards`` adds to what holds after every error: committed work stays, other changes wait.
    ``retried`` says when Airflow retries, where the class alone doesn't decide it.
    """

    meaning: str
    afterwards: str
    remedy: str
    example: str
    retried: str | None = None


ERROR_CATALOG: Final = MappingProxyType(
    {
        "ConfigError": ErrorEntry(
            "The pipeline file, an expectation file, an option or the environment is wrong, or a"
            " connection pooler answers.",
            "",
            "correct each item that the message lists",
            "pipeline file shop.yml is refused:\n"
            "  - target.tables.public.orders.wher: unknown key: remove it, or correct its spelling",
        ),
        "JavaMissing": ErrorEntry(
            "A run needs Spark, which finds no Java, or one that is too old.",
            "",
            "install Java 17 or 21 on the machine that runs the job, and set JAVA_HOME to it, or"
            " set SPARK_REMOTE to a Spark Connect server",
            "Spark needs Java: JAVA_HOME isn't set, and there is no java on PATH …",
        ),
        "FilterNotTranslatable": ErrorEntry(
            "Spark can't evaluate a part of a row filter exactly as PostgreSQL does.",
            "",
            "rewrite the part that the message names (docs/explanation/row-filters.md), or filter"
            " in the publication",
            "filter 'to_char(day, ''YYYY'') = ''2026''' can't be evaluated in Spark: …",
        ),
        "SourceUnreachable": ErrorEntry(
            "The server can't be reached, has no free connection, is starting, or ended the"
            " connection.",
            "",
            "check host, port and firewall; with too many connections, end idle ones; or wait until"
            " the server is up",
            "db.example:5432/shop can't be reached (Connection refused): …",
        ),
        "AuthenticationFailed": ErrorEntry(
            "The server refused the user, the password, the database or the client's address.",
            "",
            "correct the Airflow connection or pg_hba.conf",
            "db.example:5432/shop: the server refused user 'lake_reader': …",
        ),
        "PrivilegeMissing": ErrorEntry(
            "The role lacks a privilege.",
            "",
            "run the grant that the message names (docs/reference/privileges.md)",
            "public.orders can't be copied (permission denied for table orders): …",
        ),
        "SessionAltered": ErrorEntry(
            "A function or a login trigger of the source changed a setting of our session that"
            " decides how PostgreSQL prints values.",
            "The run uses no value of that session.",
            "find what changes settings: a login trigger, a function of the database (set_config),"
            " or a connection pooler",
            "db.example:5432/shop: extra_float_digits was set to '1' in this session, and is '-5'"
            " now, …",
        ),
        "NameUnreadable": ErrorEntry(
            "The name of a database object contains a byte that has no UTF-8 character, so"
            " PostgreSQL can't send it.",
            "",
            "rename the object that the message names",
            "db.example:5432/shop: PostgreSQL can't send a text of its catalogs as UTF-8 …",
        ),
        "PreflightFailed": ErrorEntry(
            "Setup would break the application's writes or the pipeline.",
            "",
            "correct every listed finding, then run setup again",
            "set-up refused, nothing was changed:\n  - grant create on database shop to lake_setup",
        ),
        "LockHeld": ErrorEntry(
            "Another run works on the same slot, target or stage.",
            "",
            "wait until the other run ends, or end it",
            "lock 'consume:shop_cdc' is held by another run, pid …",
        ),
        "TableBusy": ErrorEntry(
            "Another session keeps a table locked.",
            "",
            "wait for the listed sessions, or end them",
            "a table of the publications stayed locked through 10 attempts of 1000 ms; …",
        ),
        "TransactionsStillOpen": ErrorEntry(
            "A slot or a copy can't start, because older transactions are still open.",
            "",
            "end the listed transactions, or wait for them",
            "slot 'shop_cdc' can't be created while older …",
        ),
        "NotPrimary": ErrorEntry(
            "The connection leads to a standby, but this verb needs the primary.",
            "",
            "point the connection at the primary, or promote this server (docs/how-to/failover.md)",
            "db.example:5432/shop is a standby, …",
        ),
        "NotStandby": ErrorEntry(
            "The connection source.read_from leads to a primary, or to another server's standby.",
            "",
            "correct source.read_from or remove it, then run resync"
            " (docs/how-to/read-from-a-standby.md)",
            "source.read_from leads to standby.example:5432/shop, which is no standby, …",
        ),
        "SnapshotLost": ErrorEntry(
            "A table was rewritten or altered while its rows were read, or their snapshot ended.",
            "",
            "nothing if it is retried, as a copy is; otherwise run again",
            "public.orders was truncated, rewritten or detached …",
        ),
        "SlotMissing": ErrorEntry(
            "The slot was dropped, or setup never ran.",
            "",
            "run resync; for a new pipeline run setup, then the initial sync"
            " (docs/how-to/recover-a-slot.md)",
            "slot 'shop_cdc' does not exist: run resync; …",
        ),
        "SlotForeign": ErrorEntry(
            "The slot has another plugin, belongs to another database, or may belong to another"
            " consumer.",
            "",
            "choose another slot name; or drop the slot when no other program needs it",
            "slot 'shop_cdc' belongs to database 'crm': …",
        ),
        "SlotInUse": ErrorEntry(
            "Another process reads the slot, or holds its copy.",
            "",
            "stop that process, or give this pipeline its own slot",
            "slot 'shop_cdc' is in use by pid 4711 (debezium): …",
        ),
        "SlotLost": ErrorEntry(
            "PostgreSQL removed WAL that the slot still needed.",
            "",
            "run resync; raise the setting that the message names, or schedule runs more often"
            " (docs/how-to/recover-a-slot.md)",
            "slot 'shop_cdc' is lost (wal_removed): changes since 0/5A000028 are gone; …",
        ),
        "PublicationGone": ErrorEntry(
            "Before PostgreSQL 18: a listed publication was dropped, or created after changes that"
            " still wait in the slot.",
            "",
            "remove it from the file until the waiting changes are consumed, add its tables to"
            " another publication, or run teardown, setup and resync",
            "a publication does not exist at the WAL position at which slot 'shop_cdc' is read …",
        ),
        "SlotUnreadable": ErrorEntry(
            "PostgreSQL can't decode the next transaction: a row filter fails, a byte has no UTF-8"
            " character, or a row is too large.",
            "",
            "correct the filter or the row for later changes, then run resync"
            " (docs/how-to/recover-a-slot.md)",
            "slot 'shop_cdc' can't be decoded at 0/5A000028: PostgreSQL says …",
        ),
        "PeekTimeout": ErrorEntry(
            "Reading even the smallest window took longer than the statement timeout.",
            "",
            "look for a huge or old transaction",
            "reading slot 'shop_cdc' took longer than the statement timeout",
        ),
        "PeekTooLarge": ErrorEntry(
            "The server can't hold the answer of one read, because of temp_file_limit or memory."
            " The run tried smaller read windows first.",
            "",
            "change the setting that the message names",
            "the server has no room for the result of reading slot 'shop_cdc' (…): …",
        ),
        "SourceDiskFull": ErrorEntry(
            "A disk of the server is full, and reading the slot, or a query, needs space on it.",
            "",
            "free space on the named disk, soon: the server may need it for WAL"
            " (docs/how-to/emergency.md)",
            "a disk of the server is full, …",
        ),
        "NoFreeSlot": ErrorEntry(
            "The server has no free slot for the copy that a run makes before it acknowledges"
            " changes.",
            "",
            "drop unused slots, or raise max_replication_slots",
            "two free replication slots are needed to consume …",
        ),
        "SlotGap": ErrorEntry(
            "Another program consumed or recreated the slot, or the change log lost batches.",
            "",
            "find out which program did it, then run resync (docs/how-to/recover-a-slot.md)",
            "slot 'shop_cdc' is at 0/5B000000, beyond 0/5A000028, …",
        ),
        "SlotStuck": ErrorEntry(
            "The slot did not move after a run acknowledged its changes.",
            "",
            "look at pg_replication_slots and at the server's log",
            "slot 'shop_cdc' should have moved to 0/5B000000 but is at 0/5A000028: …",
        ),
        "SlotCritical": ErrorEntry(
            "The slot keeps too much WAL, or is lost soon. Only notifiers receive this error; no"
            " run fails.",
            "",
            "follow the message at once: later only a resync helps (docs/how-to/emergency.md)",
            "slot 'shop_cdc' keeps more WAL than max_slot_wal_keep_size allows …",
        ),
        "StandbyAway": ErrorEntry(
            "The standby that has the slot, or that must receive a failover slot's changes first,"
            " isn't connected or lacks WAL.",
            "",
            "start the standby, let it catch up, or remove it from synchronized_standby_slots",
            "slot 'shop_cdc' returns no changes up to 0/5B000000 before the standbys of …",
        ),
        "SourceChanged": ErrorEntry(
            "The connection leads to another server, to one restored to an earlier state, or to a"
            " promoted standby that may lack landed changes.",
            "",
            "point the connection back, or run resync (docs/how-to/failover.md)",
            "the lake holds changes up to 0/5B000000 but the server's WAL ends at 0/5A000028: …",
        ),
        "ConsumeMismatch": ErrorEntry(
            "When a run acknowledged a batch, PostgreSQL returned other changes than the run had"
            " landed.",
            "The slot or its copy keeps the changes.",
            "compare the kept slot with the change log (docs/how-to/recover-a-slot.md)",
            "slot 'shop_cdc': consumed 41 changes but landed 42 changes in batch 17; the"
            " slot 'shop_cdc_mismatch' still holds …",
        ),
        "DecodeError": ErrorEntry(
            "A replication message can't be decoded. Quarantine keeps its bytes.",
            "",
            "report the message as a bug; to continue, skip it by the command in the error"
            " (docs/how-to/decide.md), or sync its table",
            "malformed Message message: prefix at byte 10: not UTF-8",
        ),
        "SyncFailed": ErrorEntry(
            "Some tables could not be copied. The others are done.",
            "",
            "correct each table's error, then run the sync again",
            "1 of 3 tables not synced:\n  - public.orders: PrivilegeMissing: permission denied",
            retried="Retried when Airflow retries the error of at least one table.",
        ),
        "TargetNotWritable": ErrorEntry(
            "The run can't write to the lake, or can't remove files that another run left there.",
            "",
            "follow the message: disk space, permissions, or the object store",
            "file:///data/lake/public/orders can't be written (No space left on device (os error"
            " 28)): …",
            retried="Retried after an unknown cause, or when an object store did not answer.",
        ),
        "EmptyPartitionValue": ErrorEntry(
            "Spark met an empty text in a column of partition_by, which a Delta partition can't"
            " have.",
            "",
            "write cluster_by instead of partition_by, or have the source refuse such values"
            " (docs/how-to/lay-out-a-target.md)",
            "column 'country' has an empty text, …",
        ),
        "StoreRefused": ErrorEntry(
            "The lake's object store refuses the credentials, or they lack a permission, or the"
            " region is another one.",
            "",
            "correct the credentials, their permissions for target.root, or the region",
            "the lake can't be read (… 403 Forbidden …): …",
        ),
        "StoreMissing": ErrorEntry(
            "The lake's object store has no such bucket or container.",
            "",
            "create the bucket or container, or correct target.root",
            "the lake can't be read (… NoSuchBucket …): …",
        ),
        "StoreUnreachable": ErrorEntry(
            "The lake's object store doesn't answer, or answers that it has too much to do.",
            "",
            "check its address and the network; the next run continues",
            "the lake can't be read (… Connection refused …): …",
        ),
        "LateWriter": ErrorEntry(
            "A newer run committed first, or other writers keep committing to a target.",
            "",
            "nothing",
            "public.orders: another run applied changes to it at the same time: run again",
        ),
        "CatalogUnreachable": ErrorEntry(
            "The catalog can't be reached, or doesn't answer in time.",
            "",
            "nothing; the next run tries again",
            "the Hive metastore at metastore.example:9083 can't be reached …",
        ),
        "CatalogRefused": ErrorEntry(
            "The catalog refuses the credentials or a request, or they lack a permission, or it has"
            " no such catalog.",
            "",
            "correct the connection of target.catalog.conn_id, or its permissions"
            " (docs/how-to/register-tables.md)",
            "the Hive metastore at metastore.example:9083 refuses public.orders: …",
        ),
        "CatalogNameRefused": ErrorEntry(
            "The catalog can't have a target's name, or can't distinguish two targets' names.",
            "",
            "give the target another name (target.tables, name), or read it by its path",
            "the Hive metastore can't have the name 'order items': …",
        ),
        "CatalogTableForeign": ErrorEntry(
            "The catalog has an entry of a target's name that this pipeline didn't make.",
            "The entry stays as it is, and the target isn't registered.",
            "drop or rename the entry, or set target.catalog.schema",
            "the catalog has another public.orders (waldelta didn't make it, …",
        ),
        "ApplyError": ErrorEntry(
            "A key value doesn't fit its type in the lake, or changes can't be merged.",
            "",
            "follow the message",
            "key column 'valid_to' has a value that timestamp can't hold, …",
        ),
        "StagedLost": ErrorEntry(
            "A staged file that one Spark task wrote for another is missing or incomplete.",
            "",
            "nothing; if the error returns, check the lake's disk or network file system",
            "staged rows are gone: …",
        ),
        "SchemaChanged": ErrorEntry(
            "With `schema_changes: fail`, a source table's columns changed; the table or a column"
            " of its filter was renamed; a target with `copy: false` needs a copy; or a replay"
            " can't place the key's columns.",
            "",
            "run _initial_sync with the table in tables, unless you choose another way that the"
            " message offers"
            " (docs/how-to/migrate-a-schema.md)",
            "public.orders is called public.sales on the source now, …",
        ),
        "ConsentNeeded": ErrorEntry(
            "With `schema_changes: ask`, the source dropped a column, or changed a table so that"
            " only a new copy is exact.",
            "",
            "decide on the page *waiting for you*, or by waldelta decide FILE agree, or refuse"
            " (docs/how-to/migrate-a-schema.md)",
            "public.orders: the source has dropped column note (if you agree, …",
        ),
        "NeedsSync": ErrorEntry(
            "A source table changed in a way that replication doesn't send, so only a new copy is"
            " exact.",
            "",
            "nothing: the run copies a small table again, _initial_sync copies a large one",
            "public.orders was dropped and created again on the source: …",
        ),
        "SparkUnreachable": ErrorEntry(
            "The Spark Connect server or the Spark master doesn't answer, TLS or token don't"
            " match, or the driver ended.",
            "",
            "start the server, or correct address, token or TLS (docs/how-to/connect-spark.md)",
            "the Spark Connect server spark.example:15002 can't be reached (Connection refused): …",
            retried="Retried, except after a refused token or with TLS on one side only.",
        ),
        "AlertNotSent": ErrorEntry(
            "A connection in WALDELTA_ALERTS refused an alert.",
            "The next run sends it.",
            "correct the connection",
            "alerts weren't sent through connection 'alerts' (HTTP status 404): correct …",
        ),
        "StageTimeout": ErrorEntry(
            "A stage after landing took longer than its task may"
            " (batch.apply_timeout_minutes). Airflow ended it.",
            "",
            "nothing, if the stage was slow: the next run continues; otherwise find what it waited"
            " for, or raise the limit",
            "Airflow ended apply after 60 minutes; what it committed stays, …",
        ),
        "QualityFailed": ErrorEntry(
            "Critical expectations failed after the merge, or a gate stopped a table before it.",
            "The changes are applied; at a gate they wait.",
            "open the report that the log names; at a gate"
            " correct the expectation or release the changes (docs/how-to/decide.md)",
            "1 critical expectation failed (the changes are applied and safe):\n"
            "  - public.orders: amount is positive: 3 rows",
        ),
        "TargetDiffers": ErrorEntry(
            "A reconciliation found targets whose rows differ from the source.",
            "",
            "find out which program wrote to the target, then run reconcile with --repair"
            " (docs/how-to/reconcile.md)",
            "1 target doesn't match the source; …",
        ),
        "StateError": ErrorEntry(
            "The verbs ran in the wrong order, a target is gone or unreadable, or a backfill"
            " reaches further back than the change log.",
            "",
            "follow the message",
            "public.orders: its target file:///data/lake/public/orders is gone: …",
        ),
        "TargetAltered": ErrorEntry(
            "An external writer changed columns of a target, added a constraint that changes"
            " violate, set `delta.appendOnly`, or enabled a Delta feature that waldelta doesn't"
            " know.",
            "",
            "follow the message: undo the commit that it names, or sync the table again",
            "public.orders: an external writer altered its target: …",
        ),
        "ModeRefused": ErrorEntry(
            "The operation would delete rows that a target's mode keeps, or the mode needs a key.",
            "",
            "follow the message (docs/how-to/keep-history.md)",
            "public.orders has mode history in the lake, and the pipeline file says mirror, …",
        ),
    }
)

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


REMEDIES: dict[str, str] = {name: entry.remedy for name, entry in ERROR_CATALOG.items()}

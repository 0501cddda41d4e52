"""The history of expectations: one row per expectation, table and run, in
``_waldelta/expectations``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger.table import SHORT_ROWS_PER_GROUP, LedgerTable, Newest, of_tables
from waldelta.lake.storage import bookkeeping_uri
from waldelta.quantities import counted

REFERENCES_HOLD = "expect_target_rows_to_refer_to_rows"
IS_FRESH = "expect_target_to_be_fresh"
ALL_VALUES_KNOWN = "expect_target_to_know_all_values"
CAN_BE_JUDGED = "expect_target_to_be_judged"
VALUES_KNOWN = "no row is in quarantine because a value of it wasn't sent"
# What else than a target's own rows decides on: of one that hasn't changed since its check,
# maintenance judges these alone.
ON_OTHERS = frozenset({REFERENCES_HOLD, IS_FRESH, ALL_VALUES_KNOWN})
# What alone makes no check: the others that it found, if it didn't break off, stand beside these.
NO_CHECKS = ON_OTHERS | {CAN_BE_JUDGED}

_FIELDS: list[pa.Field[Any]] = [
    pa.field("at", pa.timestamp("us", tz="UTC")),
    pa.field("run_id", pa.string()),
    pa.field("table_name", pa.string()),
    pa.field("expectation", pa.string()),
    pa.field("meaning", pa.string()),
    pa.field("severity", pa.string()),
    pa.field("origin", pa.string()),
    pa.field("success", pa.bool_()),
    pa.field("observed", pa.string()),
    pa.field("unexpected_count", pa.int64()),
    pa.field("version", pa.int64()),
    pa.field("not_checked", pa.list_(pa.string())),
]


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """What one expectation found; ``success`` is null when it could not be evaluated.

    ``version`` is the target's Delta version; null of a gate, which judges what isn't merged yet,
    and of whoever discarded or repaired rows. ``not_checked`` stands in the first row of a table's
    check: what couldn't be judged at all, and why.
    """

    at: datetime
    run_id: str
    table_name: str
    expectation: str
    meaning: str
    severity: str
    origin: str
    success: bool | None
    observed: str | None
    unexpected_count: int | None
    version: int | None
    not_checked: list[str] | None = None

    table: ClassVar[str] = "expectations"
    schema: ClassVar[pa.Schema] = pa.schema(_FIELDS)


def recorded_unknown(rows: int) -> str:
    """What is observed of rows that wait for a value."""
    return counted(rows, "row in quarantine lacks values", "rows in quarantine lack values")


def append_expectation_results(
    root: str,
    results: Sequence[ExpectationResult],
    storage_options: dict[str, str] | None = None,
    after: Newest | None = None,
) -> None:
    """Add a run's results in one commit, creating the table with the first; raises LateWriter when
    they don't come ``after`` what they were to.
    """
    if results:
        expectations_table(root, storage_options).extend(
            [asdict(result) for result in results], after
        )


def last_recorded(
    root: str,
    expectation: str,
    tables: Collection[str],
    storage_options: dict[str, str] | None = None,
) -> dict[str, str | None]:
    """What was observed last of such an expectation, by table; of those of these tables of which it
    was ever told.
    """
    named = of_tables(tables)
    chosen = (pc.field("expectation") == expectation) & named
    rows = expectations_table(root, storage_options).scan(["table_name", "observed"], chosen=chosen)
    return dict(zip(rows["table_name"].to_pylist(), rows["observed"].to_pylist(), strict=True))


def newest_versions(
    root: str,
    since: datetime,
    tables: Collection[str],
    storage_options: dict[str, str] | None = None,
) -> tuple[dict[str, int], Newest]:
    """The latest version of each of these targets that a check has entered results of since then,
    and the last row that says so.
    """
    named = of_tables(tables)
    rows = expectations_table(root, storage_options).scan(
        ["at", "table_name", "version"], since, named
    )
    at = rows["at"][-1].as_py() if rows.num_rows else None
    newest = (
        rows.filter(pc.is_valid(rows["version"]))
        .group_by("table_name")
        .aggregate([("version", "max")])
    )
    versions = dict(
        zip(newest["table_name"].to_pylist(), newest["version_max"].to_pylist(), strict=True)
    )
    return versions, Newest(at, named & (pc.field("at") >= since), kept=False)


def expectations_table(root: str, storage_options: dict[str, str] | None = None) -> LedgerTable:
    """The table of results, for those who read or drop a part of it."""
    uri = bookkeeping_uri(root, ExpectationResult.table)
    return LedgerTable(uri, ExpectationResult.schema, storage_options, SHORT_ROWS_PER_GROUP)


def prune_expectation_results(
    root: str, oldest: datetime, storage_options: dict[str, str] | None = None
) -> int:
    """Drop results older than ``oldest`` but each table's last check, and leave one file; returns
    how many were dropped.
    """
    return expectations_table(root, storage_options).prune(lambda rows: _keep(rows, oldest))


def _keep(rows: Sequence[Mapping[str, Any]], oldest: datetime) -> list[bool]:
    """A table that nothing has changed since isn't checked again: what failed of it then still
    does; also where a check broke off.
    """
    checked = {
        row["table_name"]: row["at"]
        for row in rows
        if row["version"] is not None and not _is_no_check(row)
    }
    # Of a table that never was checked to an end that is all that is known.
    broke_off = {
        row["table_name"]: row["at"] for row in rows if row["expectation"] == CAN_BE_JUDGED
    }
    needed = broke_off | checked
    return [row["at"] >= min(oldest, needed.get(row["table_name"], oldest)) for row in rows]


def _is_no_check(row: Mapping[str, Any]) -> bool:
    return bool(row["expectation"] in NO_CHECKS)

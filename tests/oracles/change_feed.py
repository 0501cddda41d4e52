"""The change data feed of a target: of each version the difference to the version before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from waldelta.lake import DeltaTarget
from waldelta.lake.delta_log import Commit

TYPE, VERSION = "_change_type", "_commit_version"
_ADDED = ("insert", "update_postimage")
_GONE = ("delete", "update_preimage")


def as_rows(rows: Iterable[dict], names: Iterable[str]) -> Counter[str]:
    """The rows of these columns, however often each is there."""
    listed = [*names]
    return Counter(repr([_plain(row[name]) for name in listed]) for row in rows)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and value and _is_entry(value[0]) else value


def _is_entry(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def rows_of(uri: str, version: int, options: dict | None = None) -> list[dict]:
    """The rows of a version."""
    table = DeltaTable(uri, version=version, storage_options=options)
    return table.to_pyarrow_table().to_pylist()


def changes_by_delta_rs(uri: str, first: int, last: int, options: dict | None = None) -> list[dict]:
    """The changes of versions as delta-rs reads them, with the columns of the last one."""
    table = DeltaTable(uri, version=last, storage_options=options)
    return pa.table(table.load_cdf(first, last).read_all()).to_pylist()


def changes_by_spark(spark, uri: str, first: int, last: int) -> list[dict]:
    """The changes of versions as Spark reads them."""
    query = f"select * from table_changes_by_path('{uri}', {first}, {last})"
    return spark.sql(query).toArrow().to_pylist()


def ranges_of_columns(target: DeltaTarget, since: int) -> list[tuple[int, int, list[int]]]:
    """The versions after one, as ranges of equal columns: the first and the last version, and those
    that replace all rows. A version that changes columns is a range of its own.
    """
    ranges: list[tuple[int, int, list[int]]] = []
    schema, first, replaced = None, since + 1, list[int]()
    for commit in target.log.behind(-1):
        defined = commit.definition
        if defined is not None and defined.schema != schema:
            ranges.append((first, commit.version - 1, replaced))
            ranges.append((max(commit.version, since + 1), commit.version, [commit.version]))
            schema, first, replaced = defined.schema, max(commit.version, since) + 1, []
        if _replaces_all(commit):
            replaced.append(commit.version)
    ranges.append((first, target.open().version, replaced))
    return [one for one in ranges if one[0] <= one[1]]


def _replaces_all(commit: Commit) -> bool:
    """By a copy, a TRUNCATE, or Spark's INSERT OVERWRITE of a table without a key."""
    is_overwritten = commit.info.get("operationParameters", {}).get("mode") == "Overwrite"
    verb, truncated = commit.metadata.get("verb"), commit.metadata.get("truncated")
    return verb == "sync" or bool(truncated) or is_overwritten


def compare_change_feed(
    uri: str,
    first: int = 1,
    replaced: Iterable[int] = (),
    options: dict | None = None,
    last: int | None = None,
) -> list[str]:
    """How the feed differs from the rows of versions ``first`` to ``last``; nothing where it is
    right.

    In versions that are ``replaced`` as a whole, rows may go and come as they are. ``options`` open
    an object store. Columns are those that the version before ``first`` has, too.
    """
    table = DeltaTable(uri, version=last, storage_options=options)
    last, differences = table.version(), []
    if first > last:
        return []
    former = DeltaTable(uri, version=first - 1, storage_options=options).schema().fields
    types = {field.name: field.type for field in former}
    names = [f.name for f in table.schema().fields if types.get(f.name) == f.type]
    feed = changes_by_delta_rs(uri, first, last, options)
    before = as_rows(rows_of(uri, first - 1, options), names)
    for version in range(first, last + 1):
        shown = [row for row in feed if row[VERSION] == version]
        by_type = {
            kind: as_rows((row for row in shown if row[TYPE] == kind), names)
            for kind in (*_ADDED, *_GONE)
        }
        added, gone = (
            sum((by_type[kind] for kind in kinds), Counter()) for kinds in (_ADDED, _GONE)
        )
        after = as_rows(rows_of(uri, version, options), names)
        if gone - before or (before - gone) + added != after:
            differences.append(f"version {version}: {before=} {gone=} {added=} {after=}")
        if version not in replaced and by_type["insert"] & by_type["delete"]:
            differences.append(f"version {version} shows rows that stay: {by_type}")
        if by_type["update_preimage"].total() != by_type["update_postimage"].total():
            differences.append(f"version {version}: updates without both rows: {by_type}")
        before = after
    return differences

"""Names what external writers changed in a target's definition: columns, constraints, properties.

A target is compared with its state in the ledger before changes are merged. A constraint or a
property is named only when Delta refuses a commit because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from waldelta.config import dag_id_of
from waldelta.errors import (
    NeedsSync,
    TargetAltered,
    WaldeltaError,
    without_values,
)
from waldelta.lake import DeltaTarget, TargetVersion
from waldelta.lake.delta_log import APPEND_ONLY, Commit, Definition
from waldelta.lake.ledger import ExternalCommit, TableState
from waldelta.metadata_columns import METADATA_TYPES
from waldelta.pipeline.job import Job
from waldelta.pipeline.task_errors import writing_error
from waldelta.quantities import first_of
from waldelta.server_errors import texts
from waldelta.spark_sql import quote

_MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class _Alteration:
    """A difference in a definition; ``value`` is that part of the definition.

    ``remedy`` is what an operator does about it besides copying the table again.
    """

    what: str
    remedy: str
    value: Callable[[Definition], Any]


def why_division_stays(table: TargetVersion, by: Sequence[str]) -> str | None:
    """Returns why maintenance can't divide a target by these columns; None where it can."""
    if list(by) == list(table.layout.partition_by):
        return None
    if by and table.is_clustered:
        return (
            "a clustered target can't have partitions: move its folder away and sync the table"
            " again, or write cluster_by"
        )
    if not table.is_definable:
        return (
            "only Spark writes it: move its folder away and sync the table again, or write the"
            " former partition_by"
        )
    return None


def check_columns(job: Job, state: TableState) -> None:
    """Raise TargetAltered when a target lacks a column that it was given, or has it with another
    type.

    Raises NeedsSync when no external writer did that, but a run that was killed before the ledger
    had it, and when the target was copied without metadata columns.
    """
    target = job.lake.target(state.table_name)
    for open_table in (target.open_known, target.open):
        table = open_table()
        alterations = _of_columns(job, state, table.spark_types)
        if not alterations:
            return
    origins = _origins(table, alterations)
    _check_unrecorded(state, origins)
    if not any(origins) and METADATA_TYPES.keys().isdisjoint(table.spark_types):
        raise NeedsSync(
            f"{state.table_name}: its target was copied without metadata columns, and"
            " target.metadata_columns is true now"
        )
    raise TargetAltered(
        f"{_describe_alterations(state.table_name, alterations, origins)}, or copy the table again"
        f" ({dag_id_of(job.pipeline.pipeline, 'initial_sync')} with tables and a reason)"
    )


def foreign_columns(job: Job, state: TableState) -> list[str]:
    """Returns the columns of a target that neither its source nor waldelta has."""
    own_columns = (
        {column.name for column in state.columns} | METADATA_TYPES.keys() | _of_mode(state).keys()
    )
    types = job.lake.target(state.table_name).open().spark_types
    return [name for name in types if name not in own_columns]


def check_new_columns(job: Job, state: TableState, names: Iterable[str]) -> None:
    """Raise TargetAltered when an external writer has added a column already that the source has
    just got; NeedsSync when a killed run has.
    """
    new = {name.lower() for name in names}
    clashes = [column for column in foreign_columns(job, state) if column.lower() in new]
    if not clashes:
        return
    table = job.lake.target(state.table_name).open()
    alterations = [
        _Alteration(
            f"column {quote(name)} was added, and the source has a new column of that name",
            f"rename or drop it (ALTER TABLE {table.place.relation})",
            _column(name),
        )
        for name in clashes
    ]
    origins = _origins(table, alterations)
    _check_unrecorded(state, origins)
    raise TargetAltered(
        f"{_describe_alterations(state.table_name, alterations, origins)}, or copy the"
        f" table again, without it ({dag_id_of(job.pipeline.pipeline, 'initial_sync')} with tables"
        " and a reason)"
    )


def _check_unrecorded(state: TableState, origins: Iterable[Commit | None]) -> None:
    run_id = next((one.metadata.get("run_id") for one in origins if one and one.metadata), None)
    if run_id is not None:
        raise NeedsSync(
            f"{state.table_name}: run {run_id} changed its target's columns, and ended before the"
            " ledger had them"
        )


def refusal(
    target: DeltaTarget, label: str, err: BaseException, key: Collection[str] = ()
) -> TargetAltered | None:
    """Returns a commit that a target's definition doesn't allow as a named error; else None.

    The error names all constraints that the changes may have violated, because Spark's own error
    has values of the row. Columns of the ``key`` are NOT NULL in each target.
    """
    if (code := texts.DEFINITION_REFUSED.search(str(err))) is None:
        return None
    table = target.open()
    alterations = [*_restrictions(table, key)]
    if not alterations:
        return TargetAltered(
            f"{label}: its target {target.uri} refuses the changes ({code[0]}): see its properties"
            f" (SHOW TBLPROPERTIES {target.relation})"
        )
    described = _describe_alterations(label, alterations, _origins(table, alterations))
    return TargetAltered(f"{described}; the changes, which violate this ({code[0]}), wait")


def upgrade(
    target: DeltaTarget, label: str, after: int, err: BaseException
) -> TargetAltered | None:
    """Returns why a target can't be opened as a named error, when a commit after a version changed
    its protocol; else None.
    """
    upgrades = [commit for commit in target.log.behind(after) if commit.protocol]
    if not upgrades:
        return None
    protocol = upgrades[-1].protocol
    features = {*protocol.get("readerFeatures", ()), *protocol.get("writerFeatures", ())}
    required = ", ".join(sorted(features)) or f"reader version {protocol['minReaderVersion']}"
    return TargetAltered(
        f"{label}: an external writer altered its target: {describe_commit(upgrades[-1])} requires"
        f" {required}, and waldelta can't read it ({without_values(err)}): drop the feature (ALTER"
        f" TABLE {target.relation} DROP FEATURE), or move the target's folder away and run the"
        " initial sync for it again"
    )


def merge_error(job: Job, state: TableState, err: BaseException) -> WaldeltaError:
    """Returns a failure to merge into a target as refusal() does, or else as writing_error()."""
    target = job.lake.target(state.table_name)
    return refusal(target, state.table_name, err, state.key_columns) or writing_error(
        state.table_name, err
    )


def external_commit(commit: Commit) -> ExternalCommit:
    """Returns version, operation, writer and time of an external commit, as the log has them."""
    info = commit.info
    by = (
        ", ".join(str(info[name]) for name in ("userName", "engineInfo") if info.get(name))
        or "an unnamed writer"
    )
    milliseconds = info.get("timestamp")
    at = None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
    return ExternalCommit(
        commit.version, str(info.get("operation") or "an unnamed operation"), by, at
    )


def describe(commit: ExternalCommit) -> str:
    """Describe an external commit in a few words.

    >>> at = datetime(2026, 5, 1, tzinfo=UTC)
    >>> describe(ExternalCommit(6, "RESTORE", "alice, Apache-Spark/4.2.0", at))
    'version 6 (RESTORE by alice, Apache-Spark/4.2.0, 2026-05-01 00:00:00+0000)'
    """
    at = f", {commit.at:%Y-%m-%d %H:%M:%S%z}" if commit.at is not None else ""
    return f"version {commit.version} ({commit.operation} by {commit.by}{at})"


def describe_commit(commit: Commit) -> str:
    """Describe a commit of the log as describe() does."""
    return describe(external_commit(commit))


def _of_columns(job: Job, state: TableState, types: Mapping[str, str]) -> list[_Alteration]:
    types_of_state = {column.name: column.spark_type for column in state.columns}
    if job.pipeline.target.metadata_columns:
        types_of_state |= METADATA_TYPES | _of_mode(state)
    return [
        _of_column(name, types.get(name), kind)
        for name, kind in types_of_state.items()
        if not _is_of_type(types.get(name), kind)
    ]


def _of_mode(state: TableState) -> dict[str, str]:
    kinds = {column.name: column.spark_type for column in state.columns}
    return state.target_mode.columns({name: kinds[name] for name in state.key_columns})


def _is_of_type(kind: str | None, state_type: str) -> bool:
    if kind is not None and state_type.startswith("struct<"):
        # The key before a change, whose fields are in any order.
        return kind.startswith("struct<")
    return kind == state_type


def _of_column(name: str, kind: str | None, state_type: str) -> _Alteration:
    what = "is missing" if kind is None else f"has the type {kind} instead of {state_type}"
    return _Alteration(
        f"column {quote(name)} {what}",
        "undo that commit (ALTER TABLE, or RESTORE to the version before it)",
        _column(name),
    )


def _restrictions(table: TargetVersion, key: Collection[str]) -> Iterator[_Alteration]:
    alter = f"ALTER TABLE {table.place.relation}"
    definition = table.definition
    for name in definition.constraints:
        yield _Alteration(
            f"CHECK constraint {quote(name)} was added",
            f"drop it ({alter} DROP CONSTRAINT {quote(name)})",
            _constraint(name),
        )
    if definition.is_append_only:
        yield _Alteration(
            f"{APPEND_ONLY} was set",
            f"unset it ({alter} SET TBLPROPERTIES ('{APPEND_ONLY}' = 'false'))",
            lambda definition: definition.is_append_only,
        )
    limited = dict.fromkeys(definition.required, "NOT NULL")
    limited |= dict.fromkeys(definition.generated, "generated")
    for name in limited.keys() - {*key}:
        yield _Alteration(
            f"column {quote(name)} is {limited[name]}",
            f"change that column ({alter}), or copy the table again",
            _column(name),
        )


def _constraint(name: str) -> Callable[[Definition], Any]:
    return lambda definition: name in definition.constraints


def _column(name: str) -> Callable[[Definition], Any]:
    return lambda definition: definition.columns.get(name)


def _describe_alterations(
    label: str, alterations: Sequence[_Alteration], origins: Sequence[Commit | None]
) -> str:
    by_commit: dict[str, list[str]] = {}
    for alteration, commit in zip(alterations, origins, strict=True):
        since = "" if commit is None else f" by {describe_commit(commit)}"
        by_commit.setdefault(since, []).append(alteration.what)
    listed = "; ".join(
        f"{first_of(whats, _MOST_LISTED, ', ')}{since}" for since, whats in by_commit.items()
    )
    remedies = dict.fromkeys(alteration.remedy for alteration in alterations)
    return f"{label}: an external writer altered its target: {listed}: {', '.join(remedies)}"


def _origins(table: TargetVersion, alterations: Sequence[_Alteration]) -> list[Commit | None]:
    """Returns for each alteration the commit that made it; None when the log lacks that commit.

    The log is read once, because it may have thousands of commits in an object store.
    """
    current = table.definition
    values = [alteration.value(current) for alteration in alterations]
    latest: list[Commit | None] = [None] * len(values)
    origins = list(latest)
    searched = set(range(len(values)))
    for commit in table.place.log.before(table.version + 1):
        if (definition := commit.definition) is None:
            continue
        for number in tuple(searched):
            if alterations[number].value(definition) == values[number]:
                latest[number] = commit
            else:
                origins[number] = latest[number]
                searched.discard(number)
        if not searched:
            break
    return origins

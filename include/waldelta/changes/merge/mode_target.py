"""Turns row versions into net changes of a target that keeps more than a mirror does.

A new state or change becomes a new row. Where a state ends, the target's current row of that key is
updated or deleted. That row is looked up first. It also has the values that no event sent. The
merge itself is the same as for any other target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME, Bools, Ints, later, one_array
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
    COMPLETED_ROWS,
    PLACE,
    QUARANTINED_ROWS,
    RAW_ROWS,
    ColumnNumbering,
    codes_of,
)
from waldelta.changes.decode.row_states import Truncation
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.compare import FileRows, hashable
from waldelta.changes.merge.rows import combined_raw, has_action, match_keys
from waldelta.changes.merge.statements import NetColumns
from waldelta.changes.stage.net_files import NetFiles, batches, parts_at_once
from waldelta.changes.stage.stage import Ending, Staged
from waldelta.lake import DeltaTarget, remove_folder, write_parquet
from waldelta.lake.layout import TableFile
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark.runner import shares
from waldelta.spark_sql import quote_in_template
from waldelta.target_modes.target_mode import MOVED, STATE_XID, TO_LSN, TO_TS, Fold, TargetMode
from waldelta.types import TargetType
from waldelta.types.hstore import Hstore

_COUNTED = (ACTION_SKIP, RAW_ROWS, COMPLETED_ROWS, QUARANTINED_ROWS)
_ROWS = pa.schema([("action", pa.string()), ("rows", pa.int64())])
# The rows of one of the staged files as row versions.
ReadVersions = Callable[[NetFiles, int], pa.Table]


@dataclass(frozen=True, slots=True)
class ModeTarget:
    """A target that keeps more than a mirror: its mode, its columns, and those of the source.

    ``types`` are the source's columns by name, ``key`` and ``toastable`` positions among them.
    ``schema`` has all columns of the target. ``has_equal_keys``: keys that are written differently
    are one where PostgreSQL calls them equal, such as 1.0 and 1.00. A comparison pairs such rows,
    but changes tell them apart.
    """

    mode: TargetMode
    types: Mapping[str, TargetType]
    key: tuple[int, ...]
    toastable: tuple[int, ...]
    schema: pa.Schema
    truncates: Sequence[Truncation] = ()
    has_equal_keys: bool = False

    @property
    def key_names(self) -> list[str]:
        """The key's columns."""
        names = list(self.types)
        return [names[i] for i in self.key]

    @property
    def names(self) -> list[str]:
        """The columns that net changes write: the source's, waldelta's, and the mode's."""
        return [*self.types, LSN, COMMIT_TS, RAW, *self.mode_columns]

    @property
    def mode_columns(self) -> list[str]:
        """The columns that the mode adds."""
        return list(self.mode.columns(dict.fromkeys(self.key_names, "")))

    @property
    def net_columns(self) -> NetColumns:
        """The columns that net changes write; an update may keep the old value of any."""
        names = self.names
        identity = () if self.mode.fold.has_changes else (*self.key_names, *self.mode.identity)
        key = tuple(names.index(name) for name in identity)
        return NetColumns(
            names, ColumnNumbering(len(names), key, tuple(range(len(names)))), metadata=False
        )

    @property
    def net_schema(self) -> pa.Schema:
        """The columns of net changes."""
        net_columns, kinds = (
            self.net_columns,
            {name: kind.arrow for name, kind in self.types.items()},
        )
        types = [kinds.get(name, _plain(self.schema, name)) for name in net_columns.names]
        bases = [(f"b{k}", types[i]) for k, i in enumerate(net_columns.numbering.key)]
        flags = [(flag, pa.bool_()) for flag in net_columns.numbering.flags]
        values = zip(net_columns.numbering.values, types, strict=True)
        return pa.schema([("action", pa.string()), *bases, *values, *flags])

    def key_codes(self, keys: pa.Table) -> Ints:
        """Returns integers that are the same where the keys are equal."""
        return codes_of(self.keys_of(keys, self.key_names).columns)

    @property
    def key_types(self) -> list[TargetType]:
        """The types of the key's columns."""
        return [self.types[name] for name in self.key_names]

    def keys_of(self, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Returns columns of row versions as the target's key, comparable."""
        keys = rows.select(columns).rename_columns(self.key_names)
        if self.has_equal_keys:
            return hashable(keys, self.key_types)
        kinds = zip(self.key_names, self.key_types, strict=True)
        return keys.cast(pa.schema([(name, kind.arrow) for name, kind in kinds]))

    def places(self, rows: pa.Table, keys: pa.Table) -> Ints:
        """Returns the place of each row's key among unique ``keys`` (keys_of()); -1 for none."""
        return match_keys(self.keys_of(rows, self.key_names).columns, keys.columns)

    def lacking_names(self, rows: pa.Table) -> pa.Array:
        """Returns the names of columns whose values weren't sent, as lists; null for none."""
        flags = np.zeros((len(rows), len(self.toastable)), np.bool_)
        for k, i in enumerate(self.toastable):
            flags[:, k] = np.asarray(rows[f"u{i}"].fill_null(False))
        names = pa.array([list(self.types)[i] for i in self.toastable], pa.string())
        counts = flags.sum(axis=1)
        offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
        values = names.take(pa.array(np.nonzero(flags)[1]))
        return pa.ListArray.from_arrays(offsets, values, mask=pa.array(counts == 0))

    def old_keys(self, rows: pa.Table, column: str) -> pa.Array:
        """Returns the keys before changes that moved rows, as the struct of a column."""
        kind = self.schema.field(column).type
        names = self.key_names
        of = {name: one_array(rows[f"o{k}"]) for k, name in enumerate(names)}
        moved = one_array(rows[MOVED]).fill_null(False)
        return pa.StructArray.from_arrays(
            [of[field.name].cast(field.type) for field in kind], fields=list(kind),
            mask=pc.invert(moved),
        )  # fmt: skip

    def net_rows(self, versions: pa.Table, current: pa.Table) -> pa.Table:
        """Returns the net changes of row versions, by the current rows that the target has.

        An update of a row that the target lacks is left out.
        """
        bases = [f"b{k}" for k in range(len(self.key))]
        keys = self.keys_of(current, self.key_names)
        # Without a key, or for a new row, nothing is looked up.
        at = (
            match_keys(self.keys_of(versions, bases).columns, keys.columns)
            if bases
            else np.full(len(versions), -1, np.int64)
        )
        versions = self._complete_versions(versions, current, at)
        if self.mode.fold.has_changes:
            return self._new_rows(versions)
        begins = has_action(versions, ACTION_INSERT, ACTION_UPDATE)
        ends = versions.filter(pc.equal(versions["action"], ACTION_DELETE))
        # Another writer may have doubled a row: each of its copies ends.
        of = self.places(current, self.keys_of(ends, bases))
        ended = ends.take(pa.array(of[of >= 0]))
        gone = self.ended(current.filter(pa.array(of >= 0)), ended[TO_LSN], ended[TO_TS])
        return pa.concat_tables([self._new_rows(versions.filter(pa.array(begins))), gone])

    def ended(self, current: pa.Table, lsn: pa.ChunkedArray, at: pa.ChunkedArray) -> pa.Table:
        """Returns the updates and deletes of rows whose states end at these positions and times."""
        seen, names = self.mode.was_seen(current, lsn), self.net_columns.key_names
        columns = {f"b{k}": current[name] for k, name in enumerate(names)}
        columns["action"] = pc.if_else(seen, ACTION_UPDATE, ACTION_DELETE)
        values = self.mode.ended_values(current, lsn, at)
        return self._build_net(columns, values, len(current), stays=True)

    @property
    def ending(self) -> Ending | None:
        """What the first TRUNCATE makes of the target's rows that no net change names."""
        if not self.truncates or self.mode.fold.has_changes:
            return None
        mode, first = self.mode, self.truncates[0]

        def are_current(rows: pa.Table) -> Bools:
            return mode.may_be_current(rows, lambda rows: np.ones(len(rows), np.bool_))

        def end(current: pa.Table) -> pa.Table:
            lsn, at = (
                _repeat(value, pa.int64(), len(current)) for value in (first.lsn, first.at_us)
            )
            return self.ended(current, lsn, at.cast(UTC_TIME))

        clauses = mode.end_clauses(first.lsn, first.at_us)
        return Ending(self.mode_columns, are_current, end, clauses)

    def versions_of(self, differences: pa.Table, lsn: int, at_us: int, first: int) -> pa.Table:
        """Returns differences from a snapshot as the row versions of changes.

        ``lsn`` and ``at_us`` are its position and time. The differences are numbered from ``first``
        on, because no change tells their order.
        """
        count, bases = len(differences), [f"b{k}" for k in range(len(self.key))]
        columns = {name: differences[name] for name in differences.column_names}
        columns |= {"lsn": _repeat(lsn, pa.int64(), count)}
        columns |= {"commit_ts": _repeat(at_us, pa.int64(), count).cast(UTC_TIME)}
        if self.mode.fold.has_changes:
            gone = pc.equal(differences["action"], ACTION_DELETE)
            for base, i in zip(bases, self.key, strict=True):
                columns[f"c{i}"] = pc.if_else(gone, columns[base], columns[f"c{i}"])
            columns |= {base.replace("b", "o"): columns[base] for base in bases}
            columns |= {PLACE: pa.array(-1 - first - np.arange(count))}
            columns |= {STATE_XID: pa.nulls(count, pa.int64())}
            columns |= {MOVED: _repeat(False, pa.bool_(), count)}
            return pa.table(columns)
        open_ended = {TO_LSN: pa.nulls(count, pa.int64()), TO_TS: pa.nulls(count, UTC_TIME)}
        begins = has_action(differences, ACTION_INSERT, ACTION_UPDATE)
        inserts = {"action": _repeat(ACTION_INSERT, pa.string(), count)}
        states = pa.table({**columns, **open_ended, **inserts}).filter(pa.array(begins))
        # The state before an update ends, too, unless the new one overwrites it.
        ends = (ACTION_DELETE, ACTION_UPDATE)[: 1 + (self.mode.fold is Fold.STATES)]
        ended = {TO_LSN: columns["lsn"], TO_TS: columns["commit_ts"]}
        deletes = {"action": _repeat(ACTION_DELETE, pa.string(), count)}
        ending = pa.table({**columns, **ended, **deletes})
        return pa.concat_tables([states, ending.filter(pa.array(has_action(differences, *ends)))])

    def truncated_rows(self) -> pa.Table:
        """Returns each TRUNCATE as a change."""
        at = pa.array([truncate.at_us for truncate in self.truncates], pa.int64())
        rows = {
            "action": ["truncate"] * len(at),
            "lsn": [truncate.lsn for truncate in self.truncates],
            "commit_ts": at.cast(UTC_TIME),
            PLACE: [truncate.place for truncate in self.truncates],
            STATE_XID: [truncate.xid for truncate in self.truncates],
            MOVED: [False] * len(at),
        }
        rows |= {f"u{i}": [False] * len(at) for i in self.toastable}
        types = list(self.types.values())
        keys = {f"o{k}": pa.nulls(len(at), types[i].arrow) for k, i in enumerate(self.key)}
        values = {f"c{i}": pa.nulls(len(at), kind.arrow) for i, kind in enumerate(types)}
        values["raw"] = pa.nulls(len(at), Hstore().arrow)
        return self._new_rows(pa.table({**rows, **keys, **values}))

    def _new_rows(self, versions: pa.Table) -> pa.Table:
        """Returns complete row versions as new rows, which replace a row where the mode has one of
        each key.
        """
        replaces = self.mode.fold is Fold.LAST_STATES
        action = ACTION_UPSERT if replaces else ACTION_INSERT
        columns = {"action": pa.array([action] * len(versions), pa.string())}
        if replaces:
            columns |= {f"b{k}": versions[f"c{i}"] for k, i in enumerate(self.key)}
        values = {name: versions[f"c{i}"] for i, name in enumerate(self.types)}
        values |= {RAW: versions["raw"], **self.mode.new_values(versions, self)}
        return self._build_net(columns, values, len(versions), stays=False)

    def _build_net(
        self,
        columns: Mapping[str, object],
        values: Mapping[str, object],
        count: int,
        *,
        stays: bool,
    ) -> pa.Table:
        """Returns net changes with these values by the target's column; ``stays``: the target's
        rows keep their other values.
        """
        schema, names = self.net_schema, self.names
        filled = {**columns, **{f"c{i}": values[n] for i, n in enumerate(names) if n in values}}
        flags = {f"u{i}": stays and name not in values for i, name in enumerate(names)}
        arrays = [
            pa.array(np.full(count, flags[field.name]))
            if field.name in flags
            else _cast(filled.get(field.name), field.type, count)
            for field in schema
        ]
        return pa.table(arrays, schema=schema)

    def _complete_versions(self, versions: pa.Table, current: pa.Table, at: Ints) -> pa.Table:
        """Returns the row versions with the values that only the target has, without updates of
        rows that it lacks.
        """
        is_log = self.mode.fold.has_changes
        if not is_log:
            stays = (at >= 0) | ~has_action(versions, ACTION_UPDATE)
            versions, at = versions.filter(pa.array(stays)), at[stays]
        fills = at >= 0 if is_log else (at >= 0) & has_action(versions, ACTION_UPDATE)
        if not fills.any():
            return versions
        rows = current.take(pa.array(at, mask=~fills))
        names, columns = list(self.types), {name: versions[name] for name in versions.column_names}
        keeps: dict[str, Bools] = {}
        for i in self.toastable:
            flag = np.asarray(columns[f"u{i}"].fill_null(False))
            if not (keep := flag & fills).any():
                continue
            keeps[names[i]] = keep
            columns[f"u{i}"] = pa.array(flag & ~fills)
            kind = versions.schema.field(f"c{i}").type
            columns[f"c{i}"] = pc.if_else(
                pa.array(keep), one_array(rows[names[i]].cast(kind)), one_array(columns[f"c{i}"])
            )
        if keeps:
            columns["raw"] = combined_raw(one_array(rows[RAW]), one_array(columns["raw"]), keeps)
        if not is_log:  # A row's states follow each other, whatever the clocks say.
            began = rows[self.mode.began_at]
            columns["commit_ts"] = later(columns["commit_ts"], began)
            until = columns[TO_TS]
            columns[TO_TS] = pc.if_else(until.is_valid(), later(until, began), until)
        return pa.table(columns)


def stage_row_versions(
    runner: Runner, job: Job, plan: TargetPlan, staged: Staged, folder: str
) -> tuple[TargetPlan, Staged]:
    """Stage the net changes of a plan's row versions; returns both as a merge takes them.

    Raises ModeRefused where the target has rows of another key.
    """
    decode, place, staged = plan.decode, job.lake.target(plan.state.table_name), staged.on_disk()
    target = ModeTarget(
        plan.state.target_mode, dict(decode.columns), decode.numbering.key,
        decode.numbering.toastable, place.open().schema,
        decode.unfolding.truncates if decode.unfolding else (),
    )  # fmt: skip
    target.mode.check_stored_key(plan.state.table_name, target.schema, target.key_names)
    versions = NetFiles.of(staged.folder, job.lake)
    counts = stage_net(runner, place, target, versions, NetFiles.all_of, folder)
    totals = Counter({name: staged.counts[name] for name in _COUNTED if staged.counts.get(name)})
    if not target.mode.fold.has_changes:
        new_rows = sum(staged.counts.get(action, 0) for action in (ACTION_INSERT, ACTION_UPDATE))
        totals[ACTION_SKIP] += new_rows - counts[ACTION_INSERT] - counts[ACTION_UPSERT]
    net = NetFiles.of(f"{folder}/net", job.lake)
    names, numbering = tuple(target.names), target.net_columns.numbering
    merged = replace(
        plan,
        truncated=False,
        decode=replace(decode, names=names, numbering=numbering, unfolding=None),
    )
    return merged, Staged(net.folder, dict(totals + counts), ending=target.ending)


def stage_net(
    runner: Runner,
    place: DeltaTarget,
    target: ModeTarget,
    versions: NetFiles,
    read: ReadVersions,
    folder: str,
) -> Counter[str]:
    """Write the net changes of row versions into ``<folder>/net``; returns their number by action.

    ``read`` returns the row versions of one of the files. The target's current rows of their keys
    are staged in ``<folder>/current``.
    """
    remove_folder(folder)
    lookup = _Lookup.of(place, target, versions, folder)
    current = lookup.run(runner)

    def write(number: int) -> pa.Table:
        rows = read(versions, number)
        return _write_net(target.net_rows(rows, lookup.current_of(current, rows)), folder, number)

    counts = Counter[str]()
    for row in runner.run(len(versions.paths), _ROWS, write):
        counts[row["action"]] += row["rows"]
    if target.mode.fold.has_changes and target.truncates:
        rows = target.truncated_rows()
        write_parquet(f"{folder}/net", rows, len(versions.paths) + 1)
        counts[ACTION_INSERT] += len(rows)
    return counts


def _write_net(net: pa.Table, folder: str, number: int) -> pa.Table:
    # A part with number 0 would replace the others.
    write_parquet(f"{folder}/net", net, number + 1)
    counted = net.select(["action"]).group_by("action").aggregate([([], "count_all")])
    return counted.rename_columns(_ROWS.names).cast(_ROWS)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The search for the target's current rows of the keys of row versions.

    ``lacks_values``: some row version lacks a value that the target may have.
    """

    place: DeltaTarget
    target: ModeTarget
    versions: NetFiles
    folder: str
    lacks_values: bool

    @classmethod
    def of(cls, place: DeltaTarget, target: ModeTarget, versions: NetFiles, folder: str) -> _Lookup:
        """Returns the search for these row versions."""
        flags = [f"u{i}" for i in target.toastable if f"u{i}" in versions.schema.names]
        lacks = any(pc.any(column).as_py() for column in versions.read(flags).columns)
        return cls(place, target, versions, folder, lacks)

    @property
    def columns(self) -> list[str]:
        """The columns that are read of current rows."""
        target, names = self.target, list(self.target.types)
        values = [*(names[i] for i in target.toastable), RAW] if self.lacks_values else []
        return [*dict.fromkeys([*self.telling, *values])]

    @property
    def telling(self) -> list[str]:
        """The columns that tell which rows are current, when they began and when they end."""
        target = self.target
        return [*dict.fromkeys([*target.key_names, LSN, COMMIT_TS, *target.mode_columns])]

    def run(self, runner: Runner) -> NetFiles:
        """Stage the current rows of the keys."""
        target, is_log = self.target, self.target.mode.fold.has_changes
        if not target.key or not (self.lacks_values if is_log else self._has_ends):
            return self._nothing
        target_rows = FileRows.of(self.place.open(), target.net_columns)
        if target_rows is None:
            return self._stage_join(runner)
        return self._stage_matches(runner, target_rows)

    @property
    def _has_ends(self) -> bool:
        actions = self.versions.read(["action"])
        return bool(has_action(actions, ACTION_UPDATE, ACTION_DELETE).any())

    @property
    def _folder(self) -> str:
        return f"{self.folder}/current"

    @property
    def _nothing(self) -> NetFiles:
        return NetFiles(self._folder, self.versions.lake, [], [])

    @property
    def _bases(self) -> list[str]:
        """The columns of row versions with the keys before them."""
        return [f"b{k}" for k in range(len(self.target.key))]

    def keys(self) -> pa.Table:
        """Returns the keys of the row versions."""
        return self.target.keys_of(self.versions.read(self._bases), self._bases)

    def _stage_matches(self, runner: Runner, target_rows: FileRows) -> NetFiles:
        target, current = self.target, target_rows.files
        # A change that moved a row is in the range of its new key.
        if not target.mode.fold.has_changes:
            keys = self.versions.read(self._bases).columns
            current = target_rows.files_with(target.key_names, keys)
        parts = shares(current, sum(self.versions.rows) // 2)
        columns = self.columns
        answers = runner.run(
            len(parts), _ROWS, lambda number: self._find(parts[number], columns, number)
        )
        if not any(row["rows"] for row in answers):
            return self._nothing
        return NetFiles.of(self._folder, self.versions.lake)

    def _find(self, share: Sequence[TableFile], columns: Sequence[str], number: int) -> pa.Table:
        """Stage the current rows of some of the target's files (run as a task)."""
        place, keys = self.place, self.keys()
        opened = [file.open(place.lake, place.uri, self.target.schema) for file in share]
        totals = pa.concat_tables([rows.to_table(columns=self.telling) for rows in opened])
        matches = self.target.mode.may_be_current(
            totals, lambda rows: self.target.places(rows, keys) >= 0
        )
        read, begin = {name: pc.field(name) for name in columns}, 0
        rows: list[pa.Table] = []
        for part in (part for file in opened for part in parts_at_once(batches(file, read))):
            rows.append(part.filter(pa.array(matches[begin : begin + len(part)])))
            begin += len(part)
        if rows:  # Another writer's files may have no rows.
            write_parquet(self._folder, pa.concat_tables(rows), number + 1)
        return pa.table([["current"], [sum(map(len, rows))]], schema=_ROWS)

    def _stage_join(self, runner: Runner) -> NetFiles:
        """Stage them by Spark, which reads targets with features that Arrow can't."""
        spark, target = runner.spark("a target that only Spark reads"), self.target
        query = target.mode.live_query(self.columns, target.key_names)
        rows = spark.sql(query, rows=self.place.frame(spark))
        # A column of the target may have the name of a staged one.
        renamed = [f"{base} as _wd_k{k}" for k, base in enumerate(self._bases)]
        keys = spark.read.parquet(self.versions.folder).selectExpr(*renamed)
        names = map(quote_in_template, target.key_names)
        on = " and ".join(f"{name} = _wd_k{k}" for k, name in enumerate(names))
        joined = f"select * from {{rows}} left semi join {{keys}} on {on}"  # noqa: S608 - quoted
        current = spark.sql(joined, rows=rows, keys=keys)
        current.write.mode("overwrite").parquet(self._folder)
        return NetFiles.of(self._folder, self.versions.lake)

    def current_of(self, current: NetFiles, versions: pa.Table) -> pa.Table:
        """Returns the current rows of the keys of some row versions."""
        target = self.target
        if not current.paths:
            return self.target.schema.empty_table().select(self.columns)
        keys = target.keys_of(versions, self._bases)
        matches = target.mode.may_be_current(
            self.as_stored(current.read(self.telling)), lambda rows: target.places(rows, keys) >= 0
        )
        return target.mode.choose_current(
            self.as_stored(current.at(np.flatnonzero(matches))), target
        )

    def as_stored(self, rows: pa.Table) -> pa.Table:
        """Returns rows with the target's types; a file of Spark's may have others."""
        schema = pa.schema([self.target.schema.field(name) for name in rows.column_names])
        return rows.cast(schema)


def _repeat(value: object, kind: pa.DataType, count: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.repeat(pa.scalar(value, kind), count)], kind)


def _plain(schema: pa.Schema, name: str) -> pa.DataType | None:
    at = schema.get_field_index(name)
    return None if at < 0 else schema.field(at).type


def _cast(values: Any, kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind) if values is None else values.cast(kind)

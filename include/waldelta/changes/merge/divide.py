"""Divides a target's rows into other partitions, in one commit of files that tasks write.

Delta divides all files of a table by the same columns. So one commit replaces all files, and until
then readers see the former ones. Each task's files are recorded once they are durable. An attempt
that follows a kill takes them over, and writes only rows of files that it finds no record of, among
them files that runs have written since.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileType

from waldelta.changes.stage.net_files import batches, parts_at_once
from waldelta.errors import EmptyPartitionValue
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget, Tag, TargetVersion, remove_folder
from waldelta.lake.data_file import DataFiles, new_prefix
from waldelta.lake.layout import Layout, NewFile, Redefinition, TableFile, statistics_within
from waldelta.lake.staging_leftovers import division_folder, read_records, write_record
from waldelta.lake.storage import sync_files
from waldelta.spark import Runner
from waldelta.spark.runner import shares

log = logging.getLogger(__name__)

# Delta's transaction id of a division, numbered by the version that it divides.
_DIVISION = "waldelta:division"
_WRITTEN = pa.schema([("record", pa.string())])
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Records:
    """What tasks have written for one layout: for paths of former files, new files.

    Spark sends it to tasks, as it can't a TargetVersion.
    """

    place: DeltaTarget
    layout: Layout
    folder: str

    @property
    def _origin(self) -> list[str]:
        return [*self.layout.partition_by, self.layout.schema.to_string()]

    def write(self, former: Sequence[TableFile], files: Sequence[NewFile]) -> str:
        """Record files that a task has written, once they are durable; returns the record."""
        sync_files(self.place.uri, [file.path for file in files])
        record = {
            "origin": self._origin,
            "former": [file.path for file in former],
            "files": [[f.path, f.size, f.stats, {**f.partition}] for f in files],
        }
        return write_record(self.place.lake, self.folder, str(uuid.uuid4()), record)

    def read(self, held: set[str]) -> dict[str, list[NewFile]]:
        """Returns the new files by the former file whose rows they have; a task's are under the
        first of its former ones. ``held`` are the paths of the table's files.

        Those of another layout, those of files that the table no longer has, and those that a
        VACUUM has removed are left out. Their files stay for the next VACUUM: after a kill behind
        the commit they are the table's own, and another run may be about to commit them.
        """
        new: dict[str, list[NewFile]] = {}
        for record in read_records(self.place.lake, self.folder):
            files = [NewFile(*file) for file in record["files"]]
            is_valid = record["origin"] == self._origin and held >= {*record["former"]}
            is_first = new.keys().isdisjoint(record["former"])
            if is_valid and is_first and self._are_there([file.path for file in files]):
                first, *others = record["former"]
                new |= {first: files} | {path: [] for path in others}
        return new

    def _are_there(self, paths: list[str]) -> bool:
        infos = self.place.files.get_file_info(paths) if paths else []
        return all(info.type is FileType.File for info in infos)


def write_again(
    place: DeltaTarget, layout: Layout, files: Sequence[TableFile], prefix: str
) -> list[NewFile]:
    """Write the rows of a table's files into as few as a layout fills."""
    with DataFiles(place.files, layout, prefix) as new:
        for file in files:
            rows = batches(file.open(place.lake, place.uri, layout.schema))
            for part in parts_at_once(rows):
                new.write(part.cast(layout.schema))
        return [*map(NewFile.of, new.close())]


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of a version, divided by other columns, or by none."""

    table: TargetVersion
    table_name: str
    partition_by: Sequence[str]

    @property
    def _records(self) -> _Records:
        layout = Layout.of(self.table.schema, self.partition_by, self.table.properties)
        place = self.table.place
        return _Records(place, layout, division_folder(place.lake, self.table_name))

    def write(self, runner: Runner) -> list[NewFile]:
        """Returns the new files, and has tasks write those that no earlier attempt has recorded.

        This needs no lock, since the table's files never change. Raises EmptyPartitionValue, and
        what the runner raises.
        """
        records = self._records
        place, layout = self.table.place, records.layout
        new = records.read({file.path for file in self.table.table_files})
        parts = shares([file for file in self.table.table_files if file.path not in new])

        def write(number: int) -> pa.Table:
            written = write_again(place, layout, parts[number], new_prefix())
            record = records.write(parts[number], written)
            return pa.Table.from_pylist([{"record": record}], _WRITTEN)

        added = [file for files in new.values() for file in files]
        for row in runner.run(len(parts), _WRITTEN, write):
            added += [NewFile(*file) for file in json.loads(row["record"])["files"]]
        fault_point("maintain.divided")
        return added

    def commit(self, runner: Runner) -> None:
        """Write the files, and replace the former ones by them; the caller has the target's lock.

        Raises Overtaken, and as write() does.
        """
        added, table, records = self.write(runner), self.table, self._records
        tag = Tag.of(_DIVISION, table.version, {"verb": "maintain", "attempt": uuid.uuid4().hex})
        properties, columns = table.properties, table.schema.names
        statistics = statistics_within(properties, columns, self.partition_by)
        definition = table.defined(
            partitionColumns=[*self.partition_by], configuration={**properties, **statistics}
        )
        divided = Redefinition(records.layout, definition)
        table.replace_files(table.table_files, added, tag, changes_data=False, redefinition=divided)
        remove_folder(records.folder)
        by = ", ".join(self.partition_by) or "no column"
        log.info("table=%s is divided by %s", self.table_name, by)


def empty_texts(table: TargetVersion, columns: Sequence[str]) -> list[str]:
    """Returns those of the columns that have an empty text, which no partition can have."""
    texts, dataset = Layout(table.schema, columns).texts, table.dataset()
    return [name for name in texts if dataset.count_rows(filter=pc.field(name) == "")]


def without_partitions(
    runner: Runner, table: Callable[[], TargetVersion], table_name: str, write: Callable[[], T]
) -> T:
    """Returns what ``write`` returns. Where a partition can't have a value, the target's rows are
    divided by no column first, and it writes again.
    """
    try:
        return write()
    except EmptyPartitionValue as err:
        remove_partitions(runner, table(), table_name, err)
        return write()


def remove_partitions(
    runner: Runner, table: TargetVersion, table_name: str, err: EmptyPartitionValue
) -> None:
    """Divide a target's rows by no column; raises ``err``, which is why, where only Spark can.

    A division knows neither rows that are marked as deleted nor other names of columns in files.
    """
    if not table.is_definable:
        raise err
    log.warning("table=%s is divided by no column from now on: %s", table_name, err)
    Division(table, table_name, ()).commit(runner)

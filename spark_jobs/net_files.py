"""Net files: net changes that were staged as Parquet, read by the tasks that merge them; a row's number is its place among all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector

from spark_jobs.collapse import Bools
from waldelta.lake import SPARKS_TIMESTAMPS, rooted

_ROWS_PER_READ = 131_072


@dataclass(frozen=True, slots=True)
class NetFiles:
    """The files in their order, how many rows each has, and their bytes in memory."""

    folder: str
    storage_options: dict[str, str] | None
    paths: Sequence[str]
    rows: Sequence[int]
    bytes: int

    @classmethod
    def of(cls, folder: str, storage_options: dict[str, str] | None) -> NetFiles:
        """Those of a folder, whether Spark or Arrow wrote them."""
        files = rooted(folder, storage_options)
        listed = sorted(info.path for info in files.get_file_info(FileSelector("")))
        paths = [path for path in listed if path.rpartition("/")[2][0] not in "._"]
        rows, unpacked = [], 0
        for path in paths:
            with files.open_input_file(path) as source:
                told = pq.ParquetFile(source).metadata
            rows.append(told.num_rows)
            unpacked += sum(told.row_group(k).total_byte_size for k in range(told.num_row_groups))
        return cls(folder, storage_options, paths, rows, unpacked)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Some columns of all of them."""
        return self._opened(self.paths).to_table(columns=list(columns))

    def take(self, chosen: Bools) -> pa.Table:
        """The chosen of all of them."""
        return self._taken(self._opened(self.paths), chosen)

    def take_of(self, number: int, chosen: Bools) -> pa.Table:
        """The chosen of one file."""
        return self._taken(self._opened([self.paths[number]]), chosen)

    def _opened(self, paths: Sequence[str]) -> ds.Dataset:
        layout = ds.ParquetFileFormat(read_options=SPARKS_TIMESTAMPS)
        return ds.dataset(list(paths), filesystem=rooted(self.folder, self.storage_options), format=layout)

    @staticmethod
    def _taken(dataset: ds.Dataset, chosen: Bools) -> pa.Table:
        parts, begin = [], 0
        for part in dataset.scanner(batch_size=_ROWS_PER_READ, batch_readahead=2, fragment_readahead=1).to_batches():
            here = chosen[begin : begin + len(part)]
            begin += len(part)
            if here.any():
                parts.append(part.take(pa.array(np.flatnonzero(here))))
        return pa.Table.from_batches(parts, dataset.schema)

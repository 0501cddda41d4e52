"""Examples of rows that fail a gate: their keys and the values that the expectation reads.

The ledger stores them with the gate's result. Messages, logs and alerts never show them; pages do
to readers with the permission for row values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waldelta.changes.decode.net_rows import values_as_json
from waldelta.errors import class_and_text
from waldelta.types import TargetType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

EXAMPLE_ROWS = 5


@dataclass(frozen=True, slots=True)
class JudgedColumns:
    """The columns of the judged rows; a change may lack the values of ``toastable`` ones (by
    index).
    """

    names: Sequence[str]
    types: Sequence[TargetType]
    key: Sequence[str]
    toastable: Sequence[int] = ()


def failing_examples(
    frame: DataFrame, net: str, fails: Column, columns: JudgedColumns, read: Sequence[str] | None
) -> list[str]:
    """Returns some failing rows as JSON: ``key``, and ``values`` of the columns in ``read``.

    ``net`` is the struct of staged columns. ``read`` is None where the columns are unknown, and
    then all are included. Without examples the result is the same, so an error is only logged.
    """
    try:
        return examples_of(
            frame.where(fails).limit(EXAMPLE_ROWS).select(f"{net}.*").toArrow(), columns, read
        )
    except Exception as err:
        log.warning("rows that fail a gate can't be shown: %s", class_and_text(err))
        return []


def examples_of(rows: pa.Table, columns: JudgedColumns, read: Sequence[str] | None) -> list[str]:
    """Returns net changes as failing_examples() does."""
    flags = {columns.names[i]: rows[f"u{i}"].to_pylist() for i in columns.toastable}
    absent = [[name for name, of in flags.items() if of[n]] for n in range(len(rows))]
    texts = values_as_json(rows, list(zip(columns.names, columns.types, strict=True)), absent)
    return [_example(text, columns, read) for text in texts]


def _example(text: str, columns: JudgedColumns, read: Sequence[str] | None) -> str:
    values = json.loads(text)
    wanted = None if read is None else {name.lower() for name in read}
    return json.dumps(
        {
            "key": {name: values[name] for name in columns.key if name in values},
            "values": {
                name: value
                for name, value in values.items()
                if wanted is None or name.lower() in wanted
            },
        }
    )

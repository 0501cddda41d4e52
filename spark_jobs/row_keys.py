"""Row keys: the keys of a few rows as the quarantine names them, and how rows with such a key are found among many."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

import pyarrow as pa

from spark_jobs.decode import DecodePlan
from waldelta.arrow_columns import one_array
from waldelta.pg_text import pg_text


def row_keys(rows: pa.Table, plan: DecodePlan, columns: Iterable[str]) -> list[str]:
    """Each row's key, which stands in these columns, as a JSON object of PostgreSQL's texts."""
    names = [plan.names[i] for i in plan.shape.key]
    texts = [pg_text(one_array(rows[column])) for column in columns]
    return [json.dumps(dict(zip(names, row, strict=True))) for row in zip(*texts, strict=True)]


def first_values(keys: Collection[str], plan: DecodePlan, kind: pa.DataType) -> pa.Array:
    """What the first column of these keys holds, as ``kind``: of the rows that have it, few have another key."""
    first = plan.shape.key[0]
    texts = sorted({json.loads(key)[plan.names[first]] for key in keys})
    typed, _ = plan.types[first].from_text(pa.array(texts, pa.string()))
    return typed.cast(kind)

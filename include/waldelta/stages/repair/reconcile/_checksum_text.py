"""Canonical texts: represent a row in a checksum, computed by PostgreSQL from the source and by
Arrow from the lake.

Equal texts mean that a copy of the value taken now would equal the target's. Usually it is what
PostgreSQL prints; its type says what else (TargetType.checksum_sql). A value that the lake's type
can't store is PostgreSQL's text on both sides: the target has it in ``_wd_raw``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.compute as pc
from psycopg import sql

from waldelta.arrow import storage
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types import TargetType
from waldelta.types.checksum import Marks

_FUNCTION_ARGUMENTS = 90  # PostgreSQL takes at most 100.


def source_text(
    columns: Sequence[tuple[sql.Composable, TargetType]], marks: Marks, *, raw: bool
) -> sql.Composable:
    """Returns the SQL of a row's text, from these columns.

    Without ``raw``, a value that the lake can't store is null in the target.
    """
    null = sql.Literal(marks.null)
    values: list[sql.Composable] = [
        sql.SQL("coalesce({}, {})").format(kind.checksum_sql(column, marks, keeps_raw=raw), null)
        for column, kind in columns
    ]
    while len(values) > _FUNCTION_ARGUMENTS:
        groups = [
            values[n : n + _FUNCTION_ARGUMENTS] for n in range(0, len(values), _FUNCTION_ARGUMENTS)
        ]
        values = [_joined(group, marks) for group in groups]
    return _joined(values, marks)


def _joined(values: Sequence[sql.Composable], marks: Marks) -> sql.Composable:
    return sql.SQL("pg_catalog.concat_ws({}, {})").format(
        sql.Literal(marks.between), sql.SQL(", ").join(values)
    )


def lake_rows(
    columns: Sequence[tuple[ArrowArray, TargetType]],
    raws: Sequence[ArrowArray | None],
    marks: Marks,
) -> ArrowArray:
    """Returns the text of each row, from these columns.

    ``raws`` are each column's raw values from ``_wd_raw`` (None: it has none).
    """
    texts = []
    for (values, kind), raw in zip(columns, raws, strict=True):
        text = kind.checksum_text(storage(values), marks)
        if raw is not None and raw.null_count < len(raw):
            text = _with_raw(text, kind.checksum_raw(raw), marks)
        texts.append(pc.fill_null(text, marks.null) if text.null_count else text)
    if len(texts) == 1:
        return texts[0]
    rows: ArrowArray = pc.binary_join_element_wise(*texts, marks.between)
    return rows


def _with_raw(text: ArrowArray, raw: ArrowArray, marks: Marks) -> ArrowArray:
    # waldelta never writes both a value and its raw text, so such a row differs.
    both = pc.binary_join_element_wise(text, raw, marks.element)
    return pc.if_else(raw.is_valid(), pc.if_else(text.is_valid(), both, raw), text)

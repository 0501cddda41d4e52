"""A row filter as a Spark SQL condition with PostgreSQL's meaning; what has no certain translation is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_jobs.filter_condition import TranslationError, translate_filter
from waldelta.errors import FilterNotTranslatable
from waldelta.ledger import ColumnState
from waldelta.row_filter import RowFilter

RAW_COLUMN = "_wd_raw"


def spark_condition(
    row_filter: RowFilter, columns: Sequence[ColumnState], names: Mapping[str, str] | None = None
) -> str:
    """Spark SQL that is true exactly for the rows that the filter admits, and false or NULL for all others.

    ``columns`` are the table's columns as their target holds them. ``names`` maps a column's name to the SQL expression
    that stands for it (default: the quoted name), so that a condition can be had for old rows or prefixed columns;
    ``_wd_raw`` in it is the map of the values that stand verbatim. A mapping without ``_wd_raw`` says that there is no
    such map: columns whose type may need it are then refused. A row for which PostgreSQL raises an error raises one in
    Spark too, in sessions with ``spark.sql.ansi.enabled`` (Spark's default). Raises FilterNotTranslatable.
    """
    try:
        return translate_filter(row_filter.analysed, columns, [RAW_COLUMN]).sql
    except TranslationError as err:
        raise FilterNotTranslatable(row_filter.analysed, "its text", str(err)) from None

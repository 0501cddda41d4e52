"""Decided rows: rows in a target that fail its gates and that an operator let in all the same.

Their position distinguishes them from the others. A release covers the changes that waited for it.
Accepted rows were written with the position of the snapshot they were read from, together with rows
that passed. A later change of such a row has a later position, and the gate has judged it. A new
copy of the table reads all rows again, maybe from another server: decisions on an earlier copy say
nothing about its positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from waldelta.lake.ledger import ACCEPTED, IncompleteRow, Ledger, Release, TableState, of_tables
from waldelta.metadata_columns import LSN

if TYPE_CHECKING:
    from pyspark.sql import Column

# From the first position, up to and without the second.
PositionRange = tuple[int, int]


def read_decided(ledger: Ledger, states: Iterable[TableState]) -> dict[str, list[PositionRange]]:
    """Returns by table the positions of rows that operators let into its current copy; tables
    without any are left out.
    """
    copies = {(state.table_name, state.generation) for state in states}
    of_copies = of_tables({name for name, _ in copies})
    columns = ("table_name", "generation")
    released = ledger.table(Release).scan(
        (*columns, "after_lsn", "upto_lsn"), None, of_copies & pc.field("after_lsn").is_valid()
    )
    accepted = ledger.table(IncompleteRow).scan(
        (*columns, "lsn"),
        None,
        of_copies & (pc.field("status") == ACCEPTED) & pc.field("lsn").is_valid(),
    )
    rows = [(row, (row["after_lsn"], row["upto_lsn"])) for row in released.to_pylist()]
    rows += [(row, (row["lsn"], row["lsn"] + 1)) for row in accepted.to_pylist()]
    decided: dict[str, set[PositionRange]] = {}
    for row, positions in rows:
        if (row["table_name"], row["generation"]) in copies:
            decided.setdefault(row["table_name"], set()).add(positions)
    return {name: sorted(positions) for name, positions in decided.items()}


def is_decided(positions: Collection[PositionRange]) -> Column:
    """Returns the condition that an operator let a row of the target in."""
    from pyspark.sql import functions as F

    lsn = F.col(LSN)
    inside = [(lsn >= after) & (lsn < upto) for after, upto in positions]
    return F.coalesce(reduce(or_, inside), F.lit(False))

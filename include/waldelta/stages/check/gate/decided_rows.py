"""Decided rows: rows in a target that fail its gates and that an operator let in all the same.

They are told from the others by their position. A release covers the changes that waited for it.
Accepted rows were written with the position of the snapshot they were read from, together with rows
that passed. A later change of such a row has a later position, and the gate has judged it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from waldelta.lake.ledger import IncompleteRow, Ledger
from waldelta.lake.ledger.quarantine import ACCEPTED
from waldelta.lake.ledger.records import Release
from waldelta.lake.ledger.table import of_tables
from waldelta.metadata_columns import LSN

if TYPE_CHECKING:
    from pyspark.sql import Column

# PositionRange from the first one, up to and without the second.
PositionRange = tuple[int, int]


def read_decided(ledger: Ledger, tables: Collection[str]) -> dict[str, list[PositionRange]]:
    """Returns by table the positions of rows that operators let in; tables without any are left
    out.
    """
    found: dict[str, set[PositionRange]] = {}
    releases = ledger.table(Release).scan(
        ("table_name", "after_lsn", "upto_lsn"), None, of_tables(tables)
    )
    for row in releases.to_pylist():
        if row["after_lsn"] is not None:
            found.setdefault(row["table_name"], set()).add((row["after_lsn"], row["upto_lsn"]))
    chosen = of_tables(tables) & (pc.field("status") == ACCEPTED) & pc.field("lsn").is_valid()
    accepted = ledger.table(IncompleteRow).scan(("table_name", "lsn"), None, chosen)
    for row in accepted.to_pylist():
        found.setdefault(row["table_name"], set()).add((row["lsn"], row["lsn"] + 1))
    return {name: sorted(positions) for name, positions in found.items()}


def is_decided(positions: Collection[PositionRange]) -> Column:
    """Returns the condition that an operator let a row of the target in."""
    from pyspark.sql import functions as F

    lsn = F.col(LSN)
    inside = [(lsn >= after) & (lsn < upto) for after, upto in positions]
    return F.coalesce(reduce(or_, inside), F.lit(False))

"""Tables that were created after setup and match a pattern: a run adds them to their publication,
or reports them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from waldelta.pipeline import Job
from waldelta.postgres import Connection
from waldelta.postgres.publication_checks import MatchedTable, matched_tables
from waldelta.quantities import first_of

log = logging.getLogger(__name__)

_UNPUBLISHED = (
    "tables match a pattern of the pipeline file, but aren't published: {tables}; PostgreSQL sends"
    " none of their changes: run setup, then the initial sync, or exclude them"
)


@dataclass(frozen=True, slots=True)
class NewTables:
    """New tables: those that a run ``adopted``, those it only ``reported``; ``warnings`` are about
    both.
    """

    adopted: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def adopt_or_report(conn: Connection, job: Job) -> NewTables:
    """Add new tables to their publications where ``new_tables: adopt`` asks for it; report others.

    The caller holds the slot's lock, so that no setup runs at the same time. This is one query
    without new tables, and none without patterns.
    """
    tables = matched_tables(conn, job.pipeline.source, is_new=True)
    to_adopt = [table for table in tables if table.publication.new_tables == "adopt"]
    refused: dict[MatchedTable, str] = {}
    if to_adopt:
        # An idle check without new tables doesn't load preflight.
        from waldelta.stages.setup._adoption import adopt

        refused = adopt(conn, job, to_adopt)
    to_report = [table for table in tables if table.publication.new_tables == "report"]
    listed = [f"{table.id} ({table.patterns})" for table in to_report]
    adopted = sorted({str(table.id) for table in to_adopt if table not in refused})
    warnings = [
        *([f"new tables were added to the publication: {first_of(adopted)}"] if adopted else []),
        *([_UNPUBLISHED.format(tables=first_of(listed))] if listed else []),
        *_by_reason(refused),
    ]
    for text in warnings:
        log.warning("%s", text)
    reported = sorted({str(table.id) for table in [*to_report, *refused]})
    return NewTables(tuple(adopted), tuple(reported), tuple(warnings))


def _by_reason(refused: Mapping[MatchedTable, str]) -> Iterator[str]:
    """Yields a warning for each reason, with the tables that stay out for it."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for table, why in refused.items():
        grouped.setdefault((table.patterns, why), []).append(str(table.id))
    for (patterns, why), names in grouped.items():
        verb = "matches" if len(names) == 1 else "match"
        yield f"{first_of(names)} {verb} {patterns}: {why}"

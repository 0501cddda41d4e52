"""The trend of a table's expectations: their results in its last checks, for the table's page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pyarrow.compute as pc
from markupsafe import Markup

from waldelta.lake.ledger import ExpectationResult, Ledger, of_tables
from waldelta.lake.ledger.check_records import WORST_FIRST, Verdict, verdict_of
from waldelta.quantities import counted
from waldelta.stages.check.reports.page import parts
from waldelta.stages.check.suite.expectation import Outcome

# Checks further back aren't searched, and no more than so many are shown.
_REACH = timedelta(days=8)
_MOST_RUNS = 20


@dataclass
class Trend:
    """The verdicts on a table's expectations, by their meaning and by the time of the check."""

    verdicts: dict[str, dict[datetime, Verdict]] = field(default_factory=dict)

    def add(self, meaning: str, at: datetime, severity: str, *, success: bool | None) -> None:
        """Add a result; of several at one time the worst counts."""
        verdict = verdict_of(severity, success=success)
        own = self.verdicts.setdefault(meaning, {})
        own[at] = min(own.get(at, verdict), verdict, key=WORST_FIRST.index)

    def with_outcomes(self, outcomes: Iterable[Outcome], at: datetime) -> Markup:
        """Returns the trend as a table that ends with the outcomes of this check; empty for one."""
        last = [one for one in outcomes if one.error is None]
        for one in last:
            self.add(one.planned.meaning, at, one.planned.severity, success=one.success)
        times = sorted({at for own in self.verdicts.values() for at in own})[-_MOST_RUNS:]
        if len(times) < 2:
            return Markup()
        meanings = dict.fromkeys(one.planned.meaning for one in last)
        titles = [(time, f"{time:%Y-%m-%d %H:%M} UTC") for time in times]
        rows = []
        for name in sorted(meanings, key=lambda name: WORST_FIRST.index(self.verdicts[name][at])):
            own = self.verdicts[name]
            squares = [(own[time], title, "") if time in own else None for time, title in titles]
            rows.append((name, squares))
        caption = f"the last {counted(len(times), 'check')}, the newest at the right"
        squares = parts.squares(rows, "expectation", caption)
        return Markup("<h2>Trend</h2>{}").format(squares)


def read_trends(ledger: Ledger, tables: Collection[str], at: datetime) -> dict[str, Trend]:
    """Returns the trend of each table before a check at this time."""
    trends = {name: Trend() for name in tables}
    columns = ("at", "table_name", "meaning", "severity", "success", "version")
    chosen = of_tables(tables) & pc.is_valid(pc.field("version"))
    rows = ledger.table(ExpectationResult).scan(columns, at - _REACH, chosen)
    for row in rows.to_pylist() if trends else ():
        trend = trends[row["table_name"]]
        trend.add(row["meaning"], row["at"], row["severity"], success=row["success"])
    return trends

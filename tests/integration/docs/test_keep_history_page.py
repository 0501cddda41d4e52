"""docs/how-to/keep-history.md: its example is run, and its queries give what the page shows."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.stages.sync.sync import sync

PAGE = (Path(__file__).parents[3] / "docs/how-to/keep-history.md").read_text()
TABLES = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])["target"]["tables"]
BEFORE, FIRST, SECOND = re.findall(
    r"```sql\n((?:create|insert|update|delete).*?)```", PAGE, re.DOTALL
)
QUERIES = re.findall(r"```sql\n(select.*?)```\n+```\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.soak("every query of a page")
def test_every_query_gives_what_the_page_shows(runner, database, lake):
    assert len(QUERIES) == 6
    for statement in filter(None, map(str.strip, BEFORE.split(";"))):
        database.execute(statement)
    job = bare_job(
        database,
        lake,
        ["public.seats"],
        target={"root": lake, "tables": TABLES},
        quality={"enabled": True},
    )
    sync(runner, job)
    arguments = {}
    for changes in (FIRST, SECOND):
        for statement in filter(None, map(str.strip, changes.split(";"))):
            database.execute(statement)
        result = consume(runner, job)
        assert result.checked.failed_expectations == []
        assert set(result.checked.passed) == set(TABLES)
        if not arguments:
            moment = f"timestamp'{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}Z'"
            arguments = {":moment": moment, ":end_lsn": str(job.ledger.last_cut().end_lsn)}
    for name in TABLES:
        runner.spark().read.format("delta").load(job.lake.target(name).uri).createOrReplaceTempView(
            name.removeprefix("public.")
        )
    for query, shown in QUERIES:
        asked = re.sub(r":\w+", lambda name: arguments[name[0]], query)
        rows = runner.spark().sql(asked).collect()
        told = "".join(", ".join(_text(value) for value in row) + "\n" for row in rows)
        assert (query, told) == (query, shown)


def _text(value) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )

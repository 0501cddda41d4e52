"""The how-tos: their commands are run, in their order, and do what the pages say."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_jobs.command_line import main

pytestmark = [pytest.mark.pg, pytest.mark.spark]

DOCS = Path(__file__).parents[2] / "docs"
FILE = "include/pipelines/shop.yml"


def blocks(page, kind):
    """The page's blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def shop(spark, database, lake, tmp_path, monkeypatch):
    """Runs a page's commands, by the first page's file; Spark's are this test's session."""
    database.execute("create table orders (id int primary key, amount int)")
    database.execute("insert into orders values (1, 10), (2, 20)")
    (document,) = blocks("howto-scheduled-runs.md", "yaml")
    path = tmp_path / "shop.yml"
    slot = f"s_{database.name}"
    path.write_text(
        document.replace("file:///data/lake", lake).replace("shop_cdc", slot).replace("shop_pub", f"{slot}_pub")
    )
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)

    @contextmanager
    def open_session(*_):
        yield spark

    monkeypatch.setattr("spark_jobs.session.open_session", open_session)
    today = datetime.now(UTC).date()

    def run(page, before=lambda _: None):
        commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
        assert commands
        for command in commands:
            before(command)
            program, option, module, *arguments = shlex.split(command)
            assert (program, option, module) == ("python", "-m", "spark_jobs")
            moved = {FILE: str(path), "2026-01-31": f"{today - timedelta(1)}", "2026-02-01": f"{today + timedelta(2)}"}
            assert main([moved.get(argument, argument) for argument in arguments]) == 0, command

    yield run
    assert main(["teardown", str(path)]) == 0


def test_their_commands_do_what_they_say(spark, database, lake, shop):
    """A pipeline is set up and followed, damaged and mended, and reviewed."""

    def rows():
        held = DeltaTable(f"{lake}/public/orders").to_pyarrow_table(columns=["id", "amount"]).to_pylist()
        return sorted((row["id"], row["amount"]) for row in held)

    def change(command):
        if " consume " in command:
            database.execute("update orders set amount = 11 where id = 1")

    shop("howto-scheduled-runs.md", change)
    assert rows() == [(1, 11), (2, 20)]
    (damage,) = blocks("howto-backfill.md", "sql")
    spark.sql(damage.replace("/data/lake", lake)).collect()
    mended = []
    shop("howto-backfill.md", lambda _: mended.append(rows()))
    assert mended == [[(1, 0), (2, 0)], [(1, 11), (2, 0)], [(1, 11), (2, 20)]]
    touched = []

    def damage_again(command):
        if "--repair" in command:
            spark.sql(damage.replace("/data/lake", lake)).collect()
        touched.append(rows())

    shop("howto-review.md", damage_again)
    assert touched[-1] == [(1, 0), (2, 0)]
    assert rows() == [(1, 11), (2, 20)]

"""Each command of the how-tos, in their order, does what the pages say."""

import re
import shlex
import textwrap
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from waldelta.cli._options import ALIASES, VERBS
from waldelta.cli._output import COMMAND
from waldelta.cli.command_line import main
from waldelta.jobs import Pipeline
from waldelta.lake import Lake
from waldelta.lake.ledger import WAITING, Decision, Decisions, now

DOCS = Path(__file__).parents[3] / "docs"
FILE = "shop.yml"


def blocks(page, kind):
    """The page's blocks of one kind, without the indentation that list items give them."""
    found = re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.fixture
def shop(runner, database, lake, tmp_path, monkeypatch):
    """Runs a page's commands with the file that init writes and this test's Spark session."""
    database.execute("create table orders (id int primary key, amount int)")
    database.execute("insert into orders values (1, 10), (2, 20)")
    path = tmp_path / "shop.yml"
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)
    assert main(["init", "shop_source", "--yes", "--root", lake, "--output", str(path)]) == 0

    @contextmanager
    def open_session(*_):
        yield runner

    monkeypatch.setattr("waldelta.spark.session.open_session", open_session)
    today = datetime.now(UTC).date()

    moved = {
        FILE: str(path),
        "2026-01-31": f"{today - timedelta(1)}",
        "2026-02-01": f"{today + timedelta(2)}",
    }
    return Shop(moved)


class Shop:
    """Runs commands as the pages have them, and keeps which verbs and options it ran."""

    def __init__(self, moved):
        self.moved, self.ran = moved, set()

    def page(self, page, before=lambda _: None):
        """A page's commands."""
        text = "".join(blocks(page, "bash")).replace("\\\n", "")
        commands = text.splitlines()
        assert commands
        for command in commands:
            before(command)
            self.run(command)

    def run(self, command):
        """One command."""
        program, *arguments = shlex.split(command)
        assert program == COMMAND
        self.ran |= verb_and_options(command)
        # No gate stops the table here; tests/integration/check/test_gate.py releases one.
        code = int("release" in arguments)
        assert main([self.moved.get(argument, argument) for argument in arguments]) == code, command


def verb_and_options(command):
    """What a command, or a line on it, names: the verb alone, and with each option."""
    verb = re.search(r"waldelta ([\w-]+)", command)[1]
    return {(verb, ""), *((verb, option) for option in re.findall(r"(?<![\w-])--[a-z-]+", command))}


def named_commands():
    """Each verb and its options; single stages are named for consume."""
    return {
        (verb, option)
        for verb, of in VERBS.items()
        for option in ("", *(name for name in of.options if name.startswith("--")))
        if (option != "--stage" or verb == "consume") and verb not in ALIASES
    }


@pytest.mark.soak("every command of the pages")
def test_their_commands_do_what_they_say(runner, database, lake, shop):
    """A pipeline is set up and followed, damaged and mended, reviewed, and torn down."""

    def rows():
        held = (
            DeltaTable(f"{lake}/public/orders")
            .to_pyarrow_table(columns=["id", "amount"])
            .to_pylist()
        )
        return sorted((row["id"], row["amount"]) for row in held)

    shop.run(f"waldelta setup {FILE}")
    shop.run(f"waldelta sync {FILE}")
    database.execute("update orders set amount = 11 where id = 1")
    shop.run(f"waldelta consume {FILE}")
    assert rows() == [(1, 11), (2, 20)]
    (damage,) = blocks("how-to/backfill.md", "sql")
    runner.spark().sql(damage.replace("/data/lake", lake)).collect()
    mended = []
    shop.page("how-to/backfill.md", lambda _: mended.append(rows()))
    assert mended == [[(1, 0), (2, 0)], [(1, 11), (2, 0)], [(1, 11), (2, 20)]]
    touched = []

    def damage_again(command):
        if "--repair" in command:
            runner.spark().sql(damage.replace("/data/lake", lake)).collect()
        touched.append(rows())

    shop.page("how-to/review-reports.md", damage_again)
    assert touched[-1] == [(1, 0), (2, 0)]
    assert rows() == [(1, 11), (2, 20)]

    # Verbs and options beyond that.
    job = Pipeline.load(shop.moved[FILE]).job()
    lacking = Decision(
        now(), "r", WAITING, "public.orders", job.read_states()["public.orders"].generation, 0,
        '{"id": "9"}',
    )  # fmt: skip
    Decisions(Lake(lake)).add([lacking])
    orphan = f"orphan_{database.name}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (orphan,))
    database.execute("insert into orders values (3, 30)")
    for command in (
        "check FILE --sql",
        "dbt-sources FILE",
        "setup FILE --dry-run",
        "setup FILE --sql",
        "consume FILE --stage land",
        "consume FILE --hand-over --run-id by-hand",
        "consume FILE --again --run-id by-hand",
        "decide FILE list --tables public.orders",
        (f"decide FILE discard --tables public.orders --ids {lacking.id} --reason TEXT --by NAME"),
        "decide FILE release --tables public.orders --reason TEXT --by NAME",
        "teardown FILE --orphans",
        "decide FILE retry --tables public.orders",
        "decide FILE accept --tables public.orders --reason TEXT --by NAME",
        "replay FILE --interval-start 2026-01-31 --interval-end 2026-02-01 --tables public.orders",
        "reconcile FILE --tables public.orders",
        "sync FILE --tables public.orders --reason TEXT --due",
    ):
        shop.run(f"waldelta {command.replace('FILE', FILE)}")
    assert rows() == [(1, 11), (2, 20), (3, 30)]
    DeltaTable(f"{lake}/public/orders").delete("id = 3")
    shop.run(f"waldelta reconcile {FILE} --tables public.orders --repair --reason TEXT --by NAME")
    assert rows() == [(1, 11), (2, 20), (3, 30)]
    DeltaTable(f"{lake}/public/orders").delete("id = 2")
    shop.run(f"waldelta resync {FILE} --tables public.orders --reason TEXT --accept-server 1/1")
    shop.run(f"waldelta maintain {FILE}")
    assert rows() == [(1, 11), (2, 20), (3, 30)]
    shop.run(f"waldelta teardown {FILE}")
    # tests/integration/slot/test_slots_without_pipeline.py and rehearsal/test_command.py have the
    # situations that these two are for.
    assert named_commands() - shop.ran == {("teardown", "--drop"), ("setup", "--expect")}
    assert database.execute(
        "select slot_name::text from pg_replication_slots where database = current_database()"
    ) == [(orphan,)]

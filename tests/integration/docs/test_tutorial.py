"""docs/tutorial.md: its statements and commands run in the page's order, and give what it shows."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from waldelta.cli._options import COMMAND
from waldelta.cli.command_line import main

pytestmark = [pytest.mark.pg, pytest.mark.spark]

PAGE = (Path(__file__).parents[3] / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
FILE = "include/pipelines/shop.yml"
COMMANDS = ["check", "setup", "sync", "consume", "status", "teardown"]


@pytest.fixture
def own(database, lake, spark, monkeypatch):
    """Gives the page's roles, database, slot and lake the names of this test."""
    name = database.name

    def rename(text: str) -> str:
        text = re.sub(r"\b(shop_owner|waldelta)\b(?=[ ;:\n]|$)", rf"\1_{name}", text)
        text = text.replace("database shop", f"database {name}")
        text = text.replace("shop_cdc", f"s_{name}").replace("shop_pub", f"s_{name}_pub")
        return text.replace("file:///tmp/shop-lake", lake).replace("/tmp/shop-lake", lake)

    @contextmanager
    def open_session(*_):
        yield spark

    monkeypatch.setattr("waldelta.spark.session.open_session", open_session)
    yield rename
    database.execute(f"drop owned by waldelta_{name}, shop_owner_{name}")
    database.execute(f"drop role waldelta_{name}, shop_owner_{name}")


def test_every_step_of_the_page(database, own, tmp_path, monkeypatch):
    file, ran, shown = tmp_path / "shop.yml", [], None
    for kind, text in BLOCKS:
        if kind == "sql":
            for statement in filter(None, map(str.strip, text.split(";"))):
                database.execute(own(statement))
        elif kind == "yaml":
            assert len(text.splitlines()) == 8
            file.write_text(own(text))
        elif kind == "python":
            printed = StringIO()
            with redirect_stdout(printed):
                exec(own(text), {})
            shown = printed.getvalue()
        elif kind == "bash":
            for command in text.splitlines():
                run(command, file, ran, database, own, monkeypatch)
        else:
            assert text == shown
    assert ran == COMMANDS
    assert shown is not None


def run(command, file, ran, database, own, monkeypatch) -> None:
    """Run one command of the page; those that prepare the shell are the test's own setup."""
    if command.startswith("export "):
        name, uri = re.fullmatch(r"export (\w+)='(.*)'", command).groups()
        role, password = re.fullmatch(r"postgresql://(\w+):(.*)@localhost:5432/shop", uri).groups()
        own_uri = database.server.uri(database.name, own(role), password)
        monkeypatch.setenv(name, own_uri)
    elif command.startswith(f"{COMMAND} "):
        _, verb, path = shlex.split(command)
        assert path == FILE
        assert main([verb, str(file)]) == 0, command
        ran.append(verb)
    else:
        assert command == "make setup" or "source ." in command

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
FILE = "shop.yml"
# The page promises the first filtered table, and the first change in it, by init and three more.
COMMANDS = ["init", "setup", "sync", "consume", "status", "teardown"]
INSTALLS = ("pip install ", "waldelta jars", "make setup", "source .", "set -a; source .")


@pytest.fixture
def own(database, lake, spark, monkeypatch, tmp_path):
    """Gives the page's database and lake, and so its pipeline, the names of this test."""

    def rename(text: str) -> str:
        text = text.replace("file:///tmp/shop-lake", lake).replace("/tmp/shop-lake", lake)
        return text.replace(FILE, f"{database.name}.yml")

    @contextmanager
    def open_session(*_):
        yield spark

    monkeypatch.setattr("waldelta.spark.session.open_session", open_session)
    monkeypatch.chdir(tmp_path)
    return rename


def test_every_step_of_the_page(database, own, tmp_path, monkeypatch):
    ran, shown = [], None
    for kind, text in BLOCKS:
        if kind == "sql":
            for statement in filter(None, map(str.strip, text.split(";"))):
                database.execute(statement)
        elif kind == "yaml":
            edit(Path(own(FILE)), text)
            assert main(["check", own(FILE)]) == 0
        elif kind == "python":
            printed = StringIO()
            with redirect_stdout(printed):
                exec(own(text), {})
            shown = printed.getvalue()
        elif kind == "bash":
            for command in text.splitlines():
                run(command, ran, database, own, monkeypatch)
        else:
            assert text == shown
    assert ran == COMMANDS
    assert shown is not None


def test_the_page_is_short():
    assert len(PAGE.split()) <= 450


def edit(file: Path, lines: str) -> None:
    """Add to a file what the page shows below a line that the file has."""
    known, added = lines.split("\n", 1)
    before = file.read_text()
    assert before.count(f"{known}\n") == 1
    file.write_text(before.replace(f"{known}\n", f"{known}\n{added}"))


def run(command, ran, database, own, monkeypatch) -> None:
    """Run one command of the page; those that install are the test's own setup."""
    if command.startswith("export "):
        name, uri = re.fullmatch(r"export (\w+)='(.*)'", command).groups()
        assert re.fullmatch(r"postgresql://postgres:change-me@localhost:5432/shop", uri)
        monkeypatch.setenv(name, database.uri)
    elif command.startswith(INSTALLS):
        return
    else:
        program, verb, *rest = shlex.split(own(command))
        assert program == COMMAND
        assert main([verb, *rest]) == 0, command
        ran.append(verb)

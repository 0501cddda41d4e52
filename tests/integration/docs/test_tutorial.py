"""docs/tutorial.md: its statements and commands run in the page's order, and give what it shows."""

import re
import shlex
import subprocess
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from waldelta.cli._output import COMMAND
from waldelta.cli.command_line import main

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
# The page promises the first filtered table by init and three more.
COMMANDS = ["init", "psql", "check", "setup", "sync", "consume", "status", "teardown"]
INSTALLS = ("pip install ", "waldelta jars")
ROLES = ("postgres", "shop_reader")


@pytest.fixture
def own(database, lake, runner, monkeypatch, tmp_path):
    """Gives the page's database and lake, and so its pipeline, the names of this test."""

    def rename(text: str) -> str:
        text = text.replace("file:///tmp/lake", lake).replace("/tmp/lake", lake)
        return re.sub(r"\bshop(?=\.|_reader)", database.name, text)

    @contextmanager
    def open_session(*_):
        yield runner

    monkeypatch.setattr("waldelta.spark.session.open_session", open_session)
    monkeypatch.chdir(tmp_path)
    yield rename
    role = f"{database.name}_reader"
    database.execute(f"drop owned by {role}; drop role {role}")


def test_every_step_of_the_page(database, own, monkeypatch):
    ran, shown = [], None
    for kind, text in BLOCKS:
        if kind == "sql":
            for statement in filter(None, map(str.strip, text.split(";"))):
                database.execute(statement)
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


def run(command, ran, database, own, monkeypatch) -> None:
    """Run one command of the page; those that install are the test's own setup."""
    if command.startswith("export "):
        name, uri = re.fullmatch(r"export (\w+)='(.*)'", command).groups()
        role = re.fullmatch(r"postgresql://(\w+):change-me@localhost:5432/shop", uri)[1]
        assert role in ROLES
        reader = database.server.uri(database.name, own(role), "change-me")
        monkeypatch.setenv(name, database.uri if role == "postgres" else reader)
    elif command.startswith("psql "):
        _, _, *rest = shlex.split(own(command))
        program = [database.server.bin / "psql", "-X", "-q", database.conninfo]
        done = subprocess.run([*program, *rest], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        ran.append("psql")
    elif not command.startswith(INSTALLS):
        program, verb, *rest = shlex.split(own(command))
        assert program == COMMAND
        assert main([verb, *rest]) == 0, command
        ran.append(verb)

"""What the command line does before it starts a verb."""

import importlib.util

import pytest

from waldelta.cli.command_line import main, run_submitted


@pytest.fixture
def fetched(monkeypatch):
    """What was asked of the function that downloads jars."""
    asked = []
    monkeypatch.setattr("waldelta.spark.jars.fetch_jars", lambda *given: asked.append(given))
    return asked


def test_jars_prints_the_folder_that_jobs_search(fetched, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WALDELTA_JARS", str(tmp_path))
    assert main(["jars", "--stores=s3"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert main(["jars", str(tmp_path / "other")]) == 0
    assert fetched == [(tmp_path, ["s3"]), (tmp_path / "other", [])]


def test_without_rich_the_extra_is_named_before_a_run(monkeypatch, caplog):
    """The run would only miss it when it prints its result."""
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else known(name)
    )
    assert main(["status", "absent.yml"]) == 1
    assert "ConfigError: the command line needs package rich: run `pip install" in caplog.text


@pytest.mark.parametrize("verb, arguments", [(["check"], []), ([], ["check"])])
def test_a_launcher_has_its_own_verb_or_that_of_the_arguments(monkeypatch, verb, arguments):
    given = []
    monkeypatch.setattr("waldelta.cli.command_line.run_and_exit", given.append)
    monkeypatch.setattr("sys.argv", ["launcher.py", *arguments, "shop.yml", "--sql"])
    monkeypatch.setenv("WALDELTA_LAUNCHER", "")
    run_submitted(*verb)
    assert given == [["check", "shop.yml", "--sql"]]

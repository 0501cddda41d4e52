"""``list`` shows every file of a folder: its last run, a lake that can't be read, a refusal."""

import json
import threading

import pytest

from tests.support.bookkeeping import NOON, run
from waldelta.cli.command_line import main
from waldelta.config import load_pipeline_file
from waldelta.pipeline import ledger_of


@pytest.fixture
def listed(capsys):
    """Lists a folder, or WALDELTA_PIPELINES: the exit code and the JSON."""

    def run_list(*arguments):
        code = main(["list", "--json", *map(str, arguments)])
        return code, json.loads(capsys.readouterr().out)

    return run_list


def test_a_pipeline_with_its_last_run(write_pipeline, pipelines, listed, capsys):
    path = write_pipeline("shop", more="schedule: null")
    code, document = listed()
    (shop,) = document["pipelines"]
    assert (code, document["folder"], document["refused"]) == (0, str(pipelines), [])
    assert (shop["last_run"], shop["lake_error"]) == (None, None)
    assert shop["publications"] == [
        {"name": "shop_pub", "tables": 2, "all_tables": False, "schemas": []}
    ]
    names = ("pipeline", "file", "slot", "conn_id", "schedule")
    assert [shop[name] for name in names] == ["shop", str(path), "shop_cdc", "shop_source", None]
    ledger_of(load_pipeline_file(path)).append(run("r1", NOON, "failed"))
    code, document = listed(pipelines)
    assert (code, document["pipelines"][0]["last_run"]) == (
        0,
        {"run_id": "r1", "verb": "consume", "status": "failed", "at": "2026-01-01T12:00:00+00:00"},
    )
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for shown in ("1 pipeline in", "shop_cdc", "shop_pub: 2 tables", "by hand", "consume failed"):
        assert shown in text


def test_a_refused_file_fails_the_list_and_hides_no_other(write_pipeline, listed, capsys):
    write_pipeline("shop")
    wrong = write_pipeline("wrong", more="shcedule: null")
    code, document = listed()
    assert code == 1
    assert [one["pipeline"] for one in document["pipelines"]] == ["shop"]
    (refused,) = document["refused"]
    assert refused["file"] == str(wrong)
    assert "shcedule" in refused["error"]
    assert main(["list"]) == 1
    assert "shcedule: unknown key" in capsys.readouterr().out


def test_a_lake_that_cant_be_read_hides_no_other(write_pipeline, listed, tmp_path):
    """The list succeeds: no file is wrong."""
    write_pipeline("shop")
    odd = load_pipeline_file(write_pipeline("odd"))
    ledger_of(odd).append(run("r1", NOON))
    (log,) = (tmp_path / "lake" / "odd").rglob("runs/_delta_log")
    for entry in log.iterdir():
        entry.write_text("no JSON")
    code, document = listed()
    found = {one["pipeline"]: one for one in document["pipelines"]}
    assert (code, found["shop"]["lake_error"], found["odd"]["last_run"]) == (0, None, None)
    assert found["odd"]["lake_error"]
    assert "Traceback" not in found["odd"]["lake_error"]


def test_a_lake_that_doesnt_answer_in_time(write_pipeline, listed, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr("waldelta.cli._status_table.LAKE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("waldelta.cli._status_table._last_run", lambda _: answered.wait())
    write_pipeline("shop")
    code, document = listed()
    answered.set()
    assert code == 0
    assert document["pipelines"][0]["lake_error"] == "its lake did not answer within 0.01 s"

"""The tables that ``status`` prints of one and of all pipelines, and which slots fail it."""

import json
import threading

import pytest

from tests.support.bookkeeping import NOON, run
from waldelta.cli._output import rendered
from waldelta.cli._status_table import slot_error, status_table
from waldelta.cli.command_line import main
from waldelta.config import load_pipeline_file
from waldelta.errors import SlotLost, SlotMissing
from waldelta.pipeline import ledger_of

SLOT = {"name": "shop_cdc", "wal_status": "reserved", "confirmed_flush_lsn": "0/2", "warnings": []}
SLOT |= {"lag_bytes": 68_000, "retained_bytes": 24 << 20, "safe_wal_size": 8 << 30}
TARGET = {"action": "apply", "status": "synced", "mode": "mirror", "copy_skipped": False}
TARGET |= {"limits": [], "generation": 1, "rows_copied": 1_200, "reason": None, "quarantined": 0}
TARGET |= {"drift": [], "stopped": None, "error": None}
GATE = {
    "table": "public.orders",
    "status": "stopped",
    "reason": "amount is positive: 2 rows",
    "since": "2026-01-01T00:03:04+00:00",
    "waiting": 3,
    "may_pass": True,
}


EMPTY = "gaps unpublished absent_publications new_tables unreadable_partitions waiting"
LAST_RUN = {"run_id": "r1", "verb": "consume", "status": "succeeded"}


def status(**changed):
    """The status of a healthy pipeline, with these keys changed."""
    return {
        "pipeline": "shop",
        "slot": SLOT,
        **{name: [] for name in EMPTY.split()},
        "targets": {"public.orders": TARGET},
        "last_cut": {"batch": 7, "at": "2026-01-01T00:00:00.5+00:00", "end_lsn": 1},
        "last_run": LAST_RUN | {"at": "2026-01-01T02:03:04+02:00"},
    } | changed


def orders(**changed):
    return {"targets": {"public.orders": TARGET | changed}}


def stopped(**changed):
    gate = GATE | changed
    return orders(stopped=gate["status"]) | {"waiting": [gate]}


def test_a_healthy_pipeline_is_a_few_lines():
    """Slot, last run, last cut and one line for each target; no findings."""
    text = rendered(status_table(status()), 120)
    assert "shop_cdc: healthy (reserved), unread WAL 66 kB, keeps 24 MB of WAL" in text
    assert "8 GB left before PostgreSQL may drop it" in text
    assert "r1 (consume): succeeded, 2026-01-01 00:03:04 UTC" in text
    assert "batch 7, 2026-01-01 00:00:00 UTC" in text
    (line,) = [line for line in text.splitlines() if "public.orders" in line]
    assert [word for word in line.split() if word[0].isalnum()] == [
        "public.orders", "synced", "apply", "mirror", "1,200", "0"
    ]  # fmt: skip
    assert "Data gaps" not in text


GAP = {"from_lsn": "0/1", "to_lsn": None, "cause": "SlotLost", "remedy": "run resync"}
ERROR = {"class": "ApplyError", "message": "public.orders: no", "run_id": "r7"}
FINDINGS = {
    "a data gap": ({"gaps": [GAP]}, "Data gaps\n  0/1..?: SlotLost: run resync"),
    "a warning of the slot": ({"slot": SLOT | {"warnings": ["slot shop_cdc keeps 9 GB of WAL"]}},
     "Slot\n  slot shop_cdc keeps 9 GB of WAL"),
    "a table that isn't published": ({"unpublished": ["public.b"]},
     "In the pipeline file, but not published\n  public.b"),
    "a new table": ({"new_tables": ["sales.b"]},
     "New tables that match a pattern, but not published\n  sales.b"),
    "a message that can't be read": (
        {"waiting": [{"id": "0123456789abcdef", "status": "waiting", "actions": ["skip"]}]},
        "  to decide: waldelta decide shop.yml ACTION --ids ID --reason TEXT\n",
    ),
    "a table that a gate stops, in its line": (stopped(),
     "stopped by a gate   decide: see below"),
    "a table that a gate stops": (
        stopped(),
        (
            "Stopped by a gate\n  public.orders: since 2026-01-01 00:03:04 UTC, 3 changes wait:"
            " amount is positive: 2 rows\n"
            "    after you have corrected the data or the expectation: waldelta consume shop.yml\n"
            "    if the data is right:\n"
            "    waldelta decide shop.yml release --tables public.orders --reason TEXT\n"
        ),
    ),
    "a table that no release helps": (stopped(may_pass=False),
     "the expectation: waldelta consume shop.yml\n"),
    "a table that was released": (stopped(status="released"),
     "released; to merge them: waldelta consume shop.yml\n"),
    "a table that an error keeps behind": (
        orders(error=ERROR | {"at": "2026-01-01T00:03:04+00:00"}),
        "Behind\n  public.orders: since run r7, 2026-01-01 00:03:04 UTC: ApplyError: no\n",
    ),
    "a target without an initial copy": (orders(copy_skipped=True), "synced, no initial copy"),
    "a table that isn't copied": (orders(action="broken", status="failed"), "failed   sync it"),
    "a table that left the publication": (orders(action="removed", status="removed"),
     "removed   none: not published"),
    "drift": (orders(drift=["1 partition added"]),
     "Publication drift\n  public.orders: 1 partition added"),
    "a pipeline that never ran": ({"last_run": None, "last_cut": None, "targets": {}}, "none yet"),
}  # fmt: skip


@pytest.mark.parametrize("changed, shown", FINDINGS.values(), ids=FINDINGS)
def test_what_needs_attention_has_a_heading(changed, shown):
    assert shown in rendered(status_table(status(**changed), "shop.yml"), 120)


MISSING = {"name": "shop_cdc", "wal_status": "missing", "warnings": []}
SLOTS = {
    "missing": (MISSING, SlotMissing, "missing"),
    "lost": (SLOT | {"wal_status": "lost"}, SlotLost, "lost"),
    "reserved": (SLOT, None, "healthy (reserved)"),
    "extended": (SLOT | {"wal_status": "extended"}, None, "healthy (extended)"),
    "unreserved": (SLOT | {"wal_status": "unreserved"}, None, "about to be lost (unreserved)"),
}


@pytest.mark.parametrize("slot, kind, shown", SLOTS.values(), ids=SLOTS)
def test_status_fails_for_a_slot_that_is_missing_or_lost(slot, kind, shown):
    """The table is printed all the same."""
    error = slot_error(status(slot={"invalidation_reason": None, **slot}))
    assert type(error) is (kind or type(None))
    assert f"shop_cdc: {shown}" in rendered(status_table(status(slot=slot)), 120)


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

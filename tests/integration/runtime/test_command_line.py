"""The process around the verbs: its exit code and last words, whatever threads do."""

import getpass
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import psutil
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.soak.listener import Listener
from tests.support.pipelines import bare_job, written
from waldelta.cli.command_line import main
from waldelta.errors import ConfigError, DecodeError, LockHeld, StateError
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    DISCARDED,
    WAITING,
    Decision,
    Decisions,
    SentMessage,
    TableState,
    now,
)
from waldelta.monitoring.status import read_status
from waldelta.pgoutput.messages import UnreadMessage
from waldelta.pipeline import target_lock
from waldelta.pipeline.targets import record_unreadable
from waldelta.pipeline.targets.quarantined_rows import discard_quarantined, list_quarantined
from waldelta.pipeline.targets.unreadable_messages import notices, skip_messages

# What is left to the interpreter's end would go wrong.
ABORTS_AT_EXIT = (
    "import atexit, os, sys; atexit.register(os.abort)\n"
    "from waldelta.cli import command_line\n"
    "{before}\n"
    "command_line.run_and_exit()"
)

ENDINGS = {
    "a named error": (["status", "/nowhere.yml"], "", 1,
                      "ConfigError: pipeline file /nowhere.yml can't be read"),
    "wrong usage": (["dance"], "", 2, "invalid choice: 'dance'"),
    "success": (["status", "x"],
                "command_line.main = lambda arguments: print('said', end='') or 0", 0, ""),
    "SIGTERM": (["status", "x"],
                "command_line.main = lambda arguments: command_line._leave(15, None)", 143, ""),
    "Ctrl-C": (["status", "x"],
        "command_line.Pipeline.load = lambda _: __import__('os').kill(os.getpid(), 2)", 130,
        "ERROR interrupted: what was committed stays, and the next run goes on from there\n"),
    "a program": (["check", sys.executable], "", 1, f"ERROR ConfigError: {sys.executable} "),
    "an unknown log level": (["status", "x"], "os.environ['WALDELTA_LOG_LEVEL'] = 'loud'", 1,
                             "ERROR ConfigError: WALDELTA_LOG_LEVEL is 'LOUD'"),
    "a defect": (["status", "x"], "command_line.main = lambda arguments: 1 / 0", 1,
                 "ZeroDivisionError"),
}  # fmt: skip


def run(command, **environment):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("arguments, before, code, told", ENDINGS.values(), ids=ENDINGS)
def test_the_exit_code_is_that_of_the_verb(arguments, before, code, told):
    done = run([sys.executable, "-c", ABORTS_AT_EXIT.format(before=before), *arguments])
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Aborted" not in done.stderr
    assert ("Traceback" in done.stderr) == (told == "ZeroDivisionError")
    assert done.stdout == ("said" if code == 0 else "")


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key)")
    return bare_job(database, lake)


@pytest.fixture
def path(job, tmp_path):
    """The file of the job's pipeline."""
    return written(job.pipeline, tmp_path)


def test_status_of_a_pipeline(job, path, lake, capsys):
    """The whole answer is out before the process ends, rows in quarantine too."""
    done = run([sys.executable, "-m", "spark_jobs", "status", "--json", str(path)])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["slot"]["name"] == job.pipeline.source.slot
    assert answer["slot"]["lag_bytes"] >= 0
    assert answer["slot"]["catalog_xmin_age"] >= 0
    row = Decision(
        now(), "r", WAITING, "public.t", 1, 1, '{"id": "7"}', ["big"], '{"id": "7"}', 24, None,
        "gone", [SentMessage(1, 3, 23, 9, b"I\x00\xff"), SentMessage(1, 2, 23, 9)],
    )  # fmt: skip
    Decisions(Lake(lake)).add([row])
    job.ledger.append_state(
        TableState(
            now(), "r", "public.t", 1, "synced", incarnation=job.read_identity().incarnation
        ),
        None,
    )
    assert main(["decide", str(path), "list", "--tables=public.typo"]) == 1
    assert capsys.readouterr().out == ""
    assert main(["decide", str(path), "list", "--tables=public.t", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["key"], listed["lsn"], listed["reason"]) == ({"id": "7"}, "0/18", "gone")
    message = {"batch": 1, "seq": 3, "lsn": "0/17", "xid": 9, "raw": "4900ff"}
    assert listed["messages"] == [message, message | {"seq": 2, "raw": None}]
    # A copy that is under way, or failed, leaves the target, and what it lacks, as it was.
    for status in ("copying", "failed"):
        copy_again(job, status)
        assert [row["key"] for row in list_quarantined(job)] == [{"id": "7"}]
        told = read_status(job)["targets"]["public.t"]
        assert (told["status"], told["quarantined"]) == (status, 1)
    copy_again(job, "synced")
    assert (list_quarantined(job), read_status(job)["targets"]["public.t"]["quarantined"]) == (
        [],
        0,
    )
    assert main(["status", str(path)]) == 0
    assert f"{job.pipeline.source.slot}: healthy (reserved)" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["sync", "resync", "reconcile", "replay"])
def test_a_misspelt_table_starts_nothing(job, path, verb, caplog, monkeypatch):
    """No Spark, and no failed run in the ledger; the table that was meant is named."""
    for opened in ("open_session", "open_runner"):
        monkeypatch.setattr(f"waldelta.spark.{opened}", lambda *_: pytest.fail("started"))
    assert main([verb, str(path), "--tables=public.tt"]) == 1
    assert "no table public.tt: did you mean public.t?" in caplog.text
    assert job.ledger.last_run() is None


def test_status_fails_without_a_slot(job, path, database, capsys, caplog):
    """The table, and the JSON, are printed before the named error."""
    database.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))
    for options in ([], ["--json"]):
        assert main(["status", str(path), *options]) == 1
        assert "missing" in capsys.readouterr().out
        assert caplog.messages[-1].startswith("SlotMissing: slot ")


TRACE = re.compile(
    r"Traceback \(most recent|^\s+at [\w.$]+\(|^\s+File \"|log4j|Exception in thread", re.MULTILINE
)


@pytest.mark.nightly("processes of their own; unit tests have the last line")
@pytest.mark.spark
def test_the_named_error_is_last_and_no_trace_is_before_it(database, lake, tmp_path):
    """In a Spark task, and where there is no Java; in DEBUG the traces are there."""
    database.execute("create table t(id int primary key, n int)")
    database.execute("insert into t values (1, 0)")
    job = bare_job(database, lake)
    # The server raises for that row where a task reads it, as often as the task is tried.
    database.execute(
        f"alter publication {job.pipeline.source.publications[0].name} set table t where (10 / n"
        " > 0)"
    )
    path = written(job.pipeline, tmp_path)
    sync = [sys.executable, "-m", "spark_jobs", "sync", str(path), "--stage", "sync"]
    environment = {"WALDELTA_DRIVER_MEMORY": "1g", "WALDELTA_RUNNER": "spark"}
    failed = run(sync, **environment)
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.rpartition(" ERROR ")[2].startswith(
        "SyncFailed: 1 of 1 table not synced:"
    ), failed.stderr
    assert "SQLSTATE 22012" in failed.stderr.rpartition(" ERROR ")[2]
    assert failed.stderr.count("SyncFailed") == 1, failed.stderr
    assert TRACE.search(failed.stderr + failed.stdout) is None, failed.stderr
    failed = run(sync, **environment, JAVA_HOME=str(tmp_path))
    assert failed.returncode == 1, failed.stderr
    assert f" ERROR JavaMissing: JAVA_HOME is {tmp_path}, which has no bin/java" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert (
        "Traceback"
        in run(sync, **environment, JAVA_HOME=str(tmp_path), WALDELTA_LOG_LEVEL="DEBUG").stderr
    )


def copy_again(job, status):
    """What the ledger says of a second copy."""
    job.ledger.append(
        TableState(now(), "r", "public.t", 2, status, incarnation=job.read_identity().incarnation)
    )


@pytest.fixture
def quarantined(job, path, lake):
    """A pipeline's job, its file, and two rows in quarantine."""
    write_deltalake(job.lake.target("public.t").uri, pa.table({"id": [1]}))
    job.ledger.append_state(
        TableState(
            now(), "r", "public.t", 1, "synced", incarnation=job.read_identity().incarnation
        ),
        None,
    )
    rows = [
        Decision(now(), "r", WAITING, "public.t", 1, 0, f'{{"id": "{n}"}}', reason="why")
        for n in (7, 8)
    ]
    Decisions(Lake(lake)).add(rows)
    return job, path, rows


def test_rows_are_discarded(lake, capsys, quarantined):
    """By id or by table, all or none; not while a run works on the target."""
    job, path, (seven, eight) = quarantined

    def discard(*arguments):
        code = main(["decide", str(path), "discard", "--reason=noise", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    for refused in (["--ids", seven.id, "--ids", "typo"], ["--tables=public.typo"]):
        assert discard(*refused)[0] == 1
    with target_lock(job, "public.t"):
        assert discard("--tables=public.t")[0] == 1
    assert len(list_quarantined(job)) == 2
    copy_again(job, "failed")  # which leaves the target as it was
    code, done = discard("--ids", eight.id, "--by", "Ann", "--reason", "test data")
    assert (code, done["stages"]["discard"]["detail"]) == (0, "1 decision recorded")
    last = Decisions(Lake(lake)).rows("public.t", 1)[-1]
    assert (last.key, last.status, last.by, last.why) == (eight.key, DISCARDED, "Ann", "test data")
    assert last.at > eight.at
    assert [row["id"] for row in list_quarantined(job)] == [seven.id]
    assert discard("--ids", eight.id)[0] == 1
    # A run that was killed before its commit will quarantine its rows anew.
    Decisions(Lake(lake)).add([replace(seven, batch=1, key='{"id": "9"}')])
    with pytest.raises(
        StateError, match=r"public\.t: the run that quarantined these rows did not finish"
    ):
        discard_quarantined(job, tables=["public.t"], by="Ann", reason="noise")
    assert discard("--tables=public.t", "--ids", seven.id)[0] == 0
    assert Decisions(Lake(lake)).rows("public.t", 1)[-1].by == getpass.getuser()
    assert [row["key"]["id"] for row in list_quarantined(job)] == ["9"]


def test_a_skipped_message_and_rows_are_discarded_together_or_none(quarantined):
    """An id that isn't open, or a run at work on the rows' target, leaves the message as it was."""
    job, _, (seven, _) = quarantined
    unread = UnreadMessage.of(16, 7, b"z")
    record_unreadable(job, unread, DecodeError("slot", "kind", 0, "unknown kind 'z'"))
    skip_messages(job, [unread.id], by="Ann", reason="known")
    with pytest.raises(ConfigError, match="not in quarantine: typo"):
        discard_quarantined(job, [unread.id, seven.id, "typo"], by="Ann", reason="noise")
    with target_lock(job, "public.t"), pytest.raises(LockHeld):
        discard_quarantined(job, [unread.id, seven.id], by="Ann", reason="noise")
    assert len(notices(job)) == 1
    done = discard_quarantined(job, [unread.id, seven.id], by="Ann", reason="noise")
    assert [row.id for row in done] == [unread.id, seven.id]
    assert notices(job) == []
    assert seven.id not in [row["id"] for row in list_quarantined(job)]


@pytest.mark.spark
@pytest.mark.nightly("a JVM that is killed")
def test_a_jvm_that_dies_is_a_named_error(database, lake, tmp_path):
    """Under a task."""
    database.execute("create table t(id int primary key); insert into t values (1)")
    job = bare_job(database, lake)
    path, result = written(job.pipeline, tmp_path), tmp_path / "result.json"
    listener = Listener(tmp_path / "faults", gates=False)
    environment = {
        "WALDELTA_DRIVER_MEMORY": "1g",
        "WALDELTA_RUNNER": "spark",
        **listener.environment,
    }
    own = psutil.Process()

    def kill_jvm(_: int) -> None:
        for process in own.children(recursive=True):
            # The session that other tests share is another child.
            if process.name() == "java" and any(
                str(path) in parent.cmdline() for parent in process.parents()
            ):
                process.kill()

    listener.arm("sync.reading", kill_jvm)
    failed = run(
        [sys.executable, "-m", "spark_jobs", "sync", str(path), f"--result={result}"], **environment
    )
    listener.close()
    assert failed.returncode == 1, failed.stderr
    last = failed.stderr.rpartition(" ERROR ")[2]
    assert "SparkUnreachable: " in last
    assert "Spark's Java process (JVM) ended during the run" in last
    assert "WALDELTA_DRIVER_MEMORY" in last
    assert TRACE.search(failed.stderr + failed.stdout) is None, failed.stderr
    assert json.loads(result.read_text())["error"]["retryable"] is True

"""``doctor`` shows every finding with its remedy, in bounded time and without a stack trace."""

import json
import subprocess
import sys
import threading

import pytest

from waldelta.cli.command_line import main
from waldelta.cli.doctor import CheckResult, as_text, run_check
from waldelta.errors import SlotLost

OK = CheckResult("a", "ok", "fine")


def named():
    yield OK
    raise SlotLost("slot 'x' is lost")


def broken():
    yield OK
    raise RuntimeError("PUT failed\nAuthorization: s3cret")


ENDS = {
    "results": (lambda: [OK], ["ok"], "fine"),
    "a named error": (named, ["ok", "problem"], "SlotLost: slot 'x' is lost"),
    "another error": (broken, ["ok", "problem"], "RuntimeError: PUT failed"),
}


@pytest.mark.parametrize("check, statuses, text", ENDS.values(), ids=ENDS)
def test_a_check_ends_with_results(check, statuses, text):
    found = run_check("a", check)
    assert [one.status for one in found] == statuses
    assert found[-1].text == text


def test_a_check_that_takes_too_long_is_a_problem():
    released = threading.Event()

    def slow():
        yield OK
        released.wait()

    *before, late = run_check("a", slow, timeout_s=0.01)
    released.set()
    assert before == [OK]
    assert (late.status, late.text) == ("problem", "no answer within 0.01 s")


def test_people_see_the_remedy_of_what_is_not_fine():
    found = [
        OK,
        CheckResult("b", "warning", "old\nnews", "renew it"),
        CheckResult("c", "problem", "gone"),
    ]
    assert as_text(found).splitlines() == [
        "✓ a: fine",
        "⚠ b: old",
        "    news",
        "    renew it",
        "✗ c: gone",
        "1 problem, 1 warning",
    ]


def test_a_file_that_is_refused_is_a_problem(tmp_path, capsys, monkeypatch):
    path = tmp_path / "shop.yml"
    path.write_text("pipeline: shop\n")
    monkeypatch.setattr("waldelta.cli.doctor.installation_checks", dict)
    assert main(["doctor", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (found,) = document["checks"]
    assert (found["check"], found["status"], document["problems"]) == ("file", "problem", 1)
    assert "source" in found["text"]
    assert found["remedy"]


def test_a_missing_connection_is_named_once(write_pipeline, capsys, monkeypatch):
    """The lake is checked without it; what needs the source isn't."""
    monkeypatch.setattr("waldelta.cli.doctor.installation_checks", dict)
    monkeypatch.setenv("AIRFLOW_HOME", "/nowhere")
    assert main(["doctor", str(write_pipeline("shop")), "--json"]) == 1
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    expected = {"file": "ok", "source": "problem", "lake": "ok", "airflow": "warning"}
    assert {name: one["status"] for name, one in found.items()} == expected
    assert "set AIRFLOW_CONN_SHOP_SOURCE" in found["source"]["text"]


def test_a_package_that_is_missing_is_named_instead_of_a_stack_trace(tmp_path):
    """Whichever verb is started."""
    (tmp_path / "deltalake.py").write_text("raise ImportError('no module of that name')")
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1));"
        "runpy.run_module('waldelta', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "status", "f.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "waldelta can't start: ImportError: no module of that name" in done.stderr
    assert "packages: waldelta" in done.stderr
    assert "Traceback" not in done.stderr

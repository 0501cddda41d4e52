"""``doctor`` shows every finding of pipelines and installation with its remedy, in bounded time."""

import json
import subprocess
import sys
import threading
from importlib.metadata import version

import pytest

from waldelta.cli.command_line import main
from waldelta.cli.doctor import CheckResult, as_text, check_packages, installation_checks, run_check
from waldelta.errors import SlotLost
from waldelta.spark.jars import delta_artifact

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


NEWEST = f"numpy<={version('numpy')}"
# What the wheel's metadata requires; the statuses, and a text of the last result.
PACKAGES = {
    "in their ranges": ([NEWEST], ["ok", "ok"], "waldelta: 1 package in range"),
    "too new": (["numpy<1"], ["ok", "problem"], f"numpy {version('numpy')} (needs <1)"),
    "missing": (["absent-one>=1"], ["ok", "problem"], "waldelta lacks absent-one"),
    "missing in an extra": ([NEWEST, 'rich>1; extra == "cli"', 'absent-one; extra == "cli"'],
     ["ok", "ok", "warning"], "waldelta[cli] lacks absent-one"),
    "an extra that isn't installed": ([NEWEST, 'absent-one; extra == "other"'], ["ok", "ok"],
     "waldelta: 1 package in range"),
    "for another Python": (['absent-one; python_version < "3"'], ["ok", "ok"], "0 packages"),
}  # fmt: skip


@pytest.mark.parametrize("required, statuses, said", PACKAGES.values(), ids=PACKAGES)
def test_packages_are_compared_with_the_wheels_ranges(
    required, statuses, said, tmp_path, monkeypatch
):
    folder = tmp_path / "waldelta-9.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: waldelta", "Version: 9"]
    lines += [f"Requires-Dist: {one}" for one in required]
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    found = list(check_packages())
    assert [one.status for one in found] == statuses
    assert said in found[-1].text
    assert (found[-1].remedy != "") == (statuses[-1] != "ok")


def check(name):
    return run_check(name, installation_checks()[name])


@pytest.fixture
def java(tmp_path, monkeypatch):
    """Makes a Java of a version, to which JAVA_HOME leads."""

    def make(release):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java").touch(mode=0o755)
        (tmp_path / "release").write_text(release)

    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    return make


@pytest.mark.parametrize(
    "release, status, said",
    [
        ('JAVA_VERSION="17.0.1"', "ok", "Java 17: JAVA_HOME is"),
        ('JAVA_VERSION="21"', "ok", "Java 21: "),
        ('JAVA_VERSION="25"', "warning", "tested with 17 and 21"),
        ('JAVA_VERSION="11"', "problem", "which is Java 11"),
        (None, "problem", "which has no bin/java"),
    ],
)
def test_java(release, status, said, java):
    if release is not None:
        java(release)
    (found,) = check("java")
    assert (found.status, said in found.text) == (status, True)


def test_jars(tmp_path, monkeypatch):
    """Those of Delta must be there, and those of a store of this version, if there are any."""
    monkeypatch.setenv("WALDELTA_JARS", str(tmp_path))
    (found,) = check("jars")
    assert (found.status, "waldelta jars" in found.remedy) == ("problem", True)
    group, name, delta = delta_artifact().split(":")
    for jar in (
        f"{group}_{name}-{delta}",
        "io.unitycatalog_x",
        "org.locationtech.jts_jts-core-1",
        "org.roaringbitmap_x",
    ):
        (tmp_path / f"{jar}.jar").touch()
    (tmp_path / "s3").mkdir()
    complete, store = check("jars")
    assert (complete.status, store.status) == ("ok", "problem")
    assert store.remedy == "run `waldelta jars --stores s3`"


VARIABLES = {
    "none": ({}, ["ok"], "no variable WALDELTA_… is set"),
    "a known one": ({"WALDELTA_LOG_LEVEL": "DEBUG"}, ["ok"], "WALDELTA_LOG_LEVEL set"),
    "one of a pipeline file": ({"WALDELTA_LAKE": "file:///x"}, ["ok"], "no variable"),
    "misspelt": ({"WALDELTA_PIPELINE": "/x"}, ["ok", "warning"],
                 "WALDELTA_PIPELINE is set, but waldelta has no such variable"),
    "a wrong level": ({"WALDELTA_LOG_LEVEL": "loud"}, ["problem"], "write one of"),
    "a wrong umask": ({"WALDELTA_UMASK": "9"}, ["problem"], "umask in octal"),
    "no folder": ({"WALDELTA_PIPELINES": "/nowhere"}, ["ok", "problem"], "which is no folder"),
}  # fmt: skip


@pytest.mark.parametrize("given, statuses, said", VARIABLES.values(), ids=VARIABLES)
def test_variables(given, statuses, said, monkeypatch):
    for name in ("JARS", "LOG_LEVEL", "UMASK", "PIPELINES", "LAKE", "ALLOWED_VARIABLES"):
        monkeypatch.delenv(f"WALDELTA_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = check("variables")
    assert [one.status for one in found] == statuses
    assert said in found[-1].text


def test_a_connect_server_that_doesnt_answer(monkeypatch):
    """The address may contain a token, so it isn't shown."""
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1/;token=s3cret;use_ssl=true")
    (found,) = check("spark")
    assert found.status == "problem"
    assert "s3cret" not in found.text + found.remedy

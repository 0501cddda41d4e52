"""make setup does each step once, and says in one line what is missing."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from demo import delta_jars, java, store_jars

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", REPOSITORY / "tools/bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "requirements.txt").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/bootstrap.py").write_text("")
    return tmp_path


def fake_java(home: Path, line: str) -> Path:
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{line}' >&2\n")
    program.chmod(0o755)
    return home


def test_make_prints_every_target():
    makefile = (REPOSITORY / "Makefile").read_text()
    printed = subprocess.run(
        ["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    assert {"demo", "test", "bench", "up", "down", "lint", "schema"} <= set(targets)
    assert [t for t in targets if t not in printed] == []


def test_packages_are_installed_once(bootstrap, repository, monkeypatch):
    """The second setup runs no pip."""
    calls = []
    monkeypatch.setattr(bootstrap, "run", lambda python, *arguments: calls.append(arguments))
    python = repository / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    bootstrap.install(python, repository)
    first = len(calls)
    bootstrap.install(python, repository)
    assert (first, len(calls)) == (3, 3)


def test_a_changed_pin_installs_again(bootstrap, repository, monkeypatch):
    calls = []
    monkeypatch.setattr(bootstrap, "run", lambda python, *arguments: calls.append(arguments))
    python = repository / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    bootstrap.install(python, repository)
    (repository / "requirements.txt").write_text("a==2\n")
    bootstrap.install(python, repository)
    assert len(calls) == 6


def test_a_failed_installation_is_tried_again(bootstrap, repository, monkeypatch):
    def fail(python, *arguments):
        raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])

    monkeypatch.setattr(bootstrap, "run", fail)
    python = repository / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    with pytest.raises(subprocess.CalledProcessError):
        bootstrap.install(python, repository)
    assert not (repository / ".venv/installed").exists()


@pytest.mark.parametrize(
    "line, expected",
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_442"', 1),
        ("The operation could not be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_the_java_version_is_read_from_its_own_words(tmp_path, line, expected):
    assert java.version(fake_java(tmp_path, line)) == expected


def test_java_home_comes_first(tmp_path, monkeypatch):
    home = fake_java(tmp_path, 'openjdk version "21.0.1" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home() == home


def test_an_unfit_java_is_passed_over_and_the_remedy_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, 'openjdk version "25" 2025-09-16')))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "_USUAL_PLACES", ())
    with pytest.raises(
        java.JavaError, match=r"Java 17 or 21.*apt-get install openjdk-17-jre-headless"
    ):
        java.java_home()


def test_jars_that_are_there_are_not_fetched(monkeypatch):
    monkeypatch.setattr(delta_jars, "resolve", lambda *_: pytest.fail("the network was used"))
    assert delta_jars.fetch().name == "jars"


def test_only_the_jars_that_pyspark_lacks_are_kept(tmp_path, monkeypatch):
    delta = delta_jars.version("delta-spark")
    wanted = {
        f"io.delta_delta-spark_4.2_2.13-{delta}.jar",
        "io.unitycatalog_unitycatalog-client-0.6.0.jar",
        "org.locationtech.jts_jts-core-1.20.0.jar",
        "org.roaringbitmap_RoaringBitmap-0.9.25.jar",
    }

    def resolve(ivy, *_, **__):
        (ivy / "jars").mkdir(parents=True)
        for name in (*wanted, "org.apache.hadoop_hadoop-client-api-3.4.2.jar"):
            (ivy / "jars" / name).write_text("")

    monkeypatch.setattr(delta_jars, "resolve", resolve)
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars/io.delta_delta-spark_4.2_2.13-4.0.0.jar").write_text("")
    assert {jar.name for jar in delta_jars.fetch(tmp_path).glob("*")} == wanted


@pytest.fixture
def s3_jars(tmp_path, monkeypatch):
    """What setup does for S3 without the network: ``(its folder, what was compiled)``."""
    compiled = []

    def resolve(ivy, *_, **__):
        shutil.rmtree(ivy / "jars", ignore_errors=True)
        (ivy / "jars").mkdir(parents=True)
        for name in (
            "org.apache.hadoop_hadoop-aws-3.5.0",
            "org.apache.hadoop_hadoop-azure-3.5.0",
            "org.wildfly.openssl_wildfly-openssl-2.2.5.Final",
            "software.amazon.awssdk_s3-2.35.4",
            "org.reactivestreams_reactive-streams-1.0.4",
            "io.netty_netty-common-4.1.126.Final",
            "org.eclipse.jdt_ecj-3.40.0",
        ):
            (ivy / f"jars/{name}.jar").write_text("")

    monkeypatch.setattr(store_jars, "resolve", resolve)
    monkeypatch.setattr(store_jars, "compile_log_store", lambda jar, *_: compiled.append(jar.name))
    return tmp_path / "jars/s3", compiled


def test_a_stores_jars_are_fetched_once(tmp_path, s3_jars):
    folder, compiled = s3_jars
    for _ in range(2):
        store_jars.fetch(["s3"], tmp_path)
    assert sorted(jar.name for jar in folder.glob("*.jar")) == [
        "org.apache.hadoop_hadoop-aws-3.5.0.jar",
        "org.reactivestreams_reactive-streams-1.0.4.jar",
        "software.amazon.awssdk_s3-2.35.4.jar",
    ]
    assert compiled == ["waldelta-log-store.jar"]


def test_a_missing_jar_is_named(tmp_path, s3_jars, monkeypatch):
    monkeypatch.setattr(store_jars, "resolve", lambda *_, **__: None)
    with pytest.raises(store_jars.StoreJarsError, match=r"did not download .*hadoop-aws-\*\.jar"):
        store_jars.fetch(["s3"], tmp_path)


def test_a_changed_log_store_is_compiled_again(tmp_path, s3_jars, monkeypatch):
    _, compiled = s3_jars
    source = tmp_path / "S3ConditionalLogStore.java"
    monkeypatch.setattr(store_jars, "LOG_STORE", source)
    for text in ("one", "other"):
        source.write_text(text)
        store_jars.fetch(["s3"], tmp_path)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "named, code", [("", 0), (" , ", 0), ("s3", 0), ("azure", 0), ("s3,s4", 1), ("S3", 1)]
)
def test_stores_are_chosen_by_a_variable(s3_jars, monkeypatch, capsys, tmp_path, named, code):
    monkeypatch.setenv("WALDELTA_STORES", named)
    monkeypatch.setattr(store_jars, "CACHE", tmp_path)
    assert store_jars.main() == code
    assert ("WALDELTA_STORES names the store" in capsys.readouterr().err) == bool(code)
    assert s3_jars[0].exists() == named.startswith("s3")

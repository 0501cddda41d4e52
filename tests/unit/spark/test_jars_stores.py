"""The jars of object stores are downloaded once, into a folder of each store."""

import hashlib
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from waldelta.errors import ConfigError
from waldelta.spark import jars
from waldelta.spark.jars import fetch_jars

WANTED = (
    "org.apache.hadoop_hadoop-aws-3.5.0",
    "org.apache.hadoop_hadoop-azure-3.5.0",
    "org.wildfly.openssl_wildfly-openssl-2.2.5.Final",
    "software.amazon.awssdk_s3-2.35.4",
    "org.reactivestreams_reactive-streams-1.0.4",
    "org.eclipse.jdt_ecj-3.40.0",
)


@pytest.fixture
def s3_jars(tmp_path, monkeypatch):
    """What is done for S3 without the network: ``(its folder, what was compiled)``."""
    compiled = []

    @contextmanager
    def resolved(*_, **__):
        shutil.rmtree(folder := tmp_path / "ivy", ignore_errors=True)
        folder.mkdir()
        for name in (*WANTED, "io.netty_netty-common-4.1.126.Final"):
            (folder / f"{name}.jar").write_text("")
        yield folder

    monkeypatch.setattr(jars, "resolved", resolved)
    empty = hashlib.sha256(b"").hexdigest()
    (sums := tmp_path / "sums").write_text("".join(f"{empty}  {name}.jar\n" for name in WANTED))
    monkeypatch.setattr(jars, "SUMS", sums)
    monkeypatch.setattr(jars, "fetch_delta_jars", lambda folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(jars, "compile_log_store", lambda jar, *_: compiled.append(jar.name))
    return tmp_path / "jars/s3", compiled


def test_a_stores_jars_are_fetched_once(tmp_path, s3_jars):
    folder, compiled = s3_jars
    for _ in range(2):
        fetch_jars(tmp_path / "jars", ["s3"])
    assert sorted(jar.name for jar in folder.glob("*.jar")) == [
        "org.apache.hadoop_hadoop-aws-3.5.0.jar",
        "org.reactivestreams_reactive-streams-1.0.4.jar",
        "software.amazon.awssdk_s3-2.35.4.jar",
    ]
    assert compiled == ["waldelta-log-store.jar"]


def test_each_store_has_a_folder(tmp_path, s3_jars):
    fetch_jars(tmp_path / "jars", ["s3", "azure"])
    assert {path.name for path in (tmp_path / "jars").iterdir()} == {"s3", "azure"}


def test_a_missing_jar_is_named(tmp_path, s3_jars, monkeypatch):
    @contextmanager
    def nothing(*_, **__):
        (tmp_path / "ivy").mkdir()
        yield tmp_path / "ivy"

    monkeypatch.setattr(jars, "resolved", nothing)
    with pytest.raises(ConfigError, match=r"Maven has no .*hadoop-aws-\*\.jar, which s3 needs"):
        fetch_jars(tmp_path / "jars", ["s3"])


def test_a_changed_log_store_is_compiled_again(tmp_path, s3_jars, monkeypatch):
    _, compiled = s3_jars
    source = tmp_path / "S3ConditionalLogStore.java"
    monkeypatch.setattr(jars, "LOG_STORE", source)
    for text in ("one", "other"):
        source.write_text(text)
        fetch_jars(tmp_path / "jars", ["s3"])
    assert len(compiled) == 2


def test_a_folder_that_waldelta_did_not_make_is_refused(tmp_path, s3_jars):
    """Before anything is fetched."""
    folder, compiled = s3_jars
    folder.mkdir(parents=True)
    (folder / "data.parquet").write_text("mine")
    with pytest.raises(ConfigError, match=r"jars/s3 has files, but `waldelta jars`"):
        fetch_jars(tmp_path / "jars", ["azure", "s3"])
    assert (folder / "data.parquet").read_text() == "mine"
    assert not (tmp_path / "jars" / "azure").exists()
    assert compiled == []


def test_an_empty_folder_of_a_store_is_filled(tmp_path, s3_jars):
    s3_jars[0].mkdir(parents=True)
    fetch_jars(tmp_path / "jars", ["s3"])
    assert list(s3_jars[0].glob("*hadoop-aws*"))


def test_only_jars_of_the_store_are_replaced(tmp_path, s3_jars, monkeypatch):
    folder, _ = s3_jars
    fetch_jars(tmp_path / "jars", ["s3"])
    (folder / "software.amazon.awssdk_s3-1.0.jar").write_text("earlier")
    (folder / "mine.jar").write_text("mine")
    source = tmp_path / "S3ConditionalLogStore.java"
    source.write_text("another")
    monkeypatch.setattr(jars, "LOG_STORE", source)
    fetch_jars(tmp_path / "jars", ["s3"])
    assert not (folder / "software.amazon.awssdk_s3-1.0.jar").exists()
    assert (folder / "mine.jar").read_text() == "mine"


def test_the_next_download_replaces_what_a_killed_one_left(tmp_path, s3_jars, monkeypatch):
    folder, _ = s3_jars
    copy = shutil.copy2

    def kill(source, target):
        if source.name.startswith("software.amazon"):
            Path(target).write_text("half")
            raise KeyboardInterrupt
        return copy(source, target)

    monkeypatch.setattr(shutil, "copy2", kill)
    with pytest.raises(KeyboardInterrupt):
        fetch_jars(tmp_path / "jars", ["s3"])
    assert not list(folder.glob("software.amazon*.jar"))
    monkeypatch.setattr(shutil, "copy2", copy)
    fetch_jars(tmp_path / "jars", ["s3"])
    assert [jar.name for jar in folder.glob("software.amazon*")] == [
        "software.amazon.awssdk_s3-2.35.4.jar"
    ]


@pytest.mark.parametrize("versions", [(), ("4.3.0", "4.4.0")])
def test_the_log_store_needs_one_jar_of_deltas_storage(tmp_path, versions):
    for version in versions:
        (tmp_path / f"io.delta_delta-storage-{version}.jar").write_text("")
    with pytest.raises(ConfigError, match=rf"has {len(versions)} jars of delta-st.*: delete "):
        jars.compile_log_store(tmp_path / "made.jar", tmp_path / "ecj.jar", tmp_path)


@pytest.mark.parametrize("name", ["s4", "S3", ""])
def test_an_unknown_store_is_named_before_anything_is_fetched(tmp_path, s3_jars, name):
    with pytest.raises(ConfigError, match=r"no jars of a store .*: write s3 or azure"):
        fetch_jars(tmp_path / "jars", ["s3", name])
    assert not (tmp_path / "jars").exists()

"""The jars of object stores are downloaded once, into a folder of each store."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

from waldelta.errors import ConfigError
from waldelta.spark import store_jars
from waldelta.spark.store_jars import fetch_jars


@pytest.fixture
def s3_jars(tmp_path, monkeypatch):
    """What is done for S3 without the network: ``(its folder, what was compiled)``."""
    compiled = []

    @contextmanager
    def resolved(*_, **__):
        shutil.rmtree(folder := tmp_path / "ivy", ignore_errors=True)
        folder.mkdir()
        for name in (
            "org.apache.hadoop_hadoop-aws-3.5.0",
            "org.apache.hadoop_hadoop-azure-3.5.0",
            "org.wildfly.openssl_wildfly-openssl-2.2.5.Final",
            "software.amazon.awssdk_s3-2.35.4",
            "org.reactivestreams_reactive-streams-1.0.4",
            "io.netty_netty-common-4.1.126.Final",
            "org.eclipse.jdt_ecj-3.40.0",
        ):
            (folder / f"{name}.jar").write_text("")
        yield folder

    monkeypatch.setattr(store_jars, "resolved", resolved)
    monkeypatch.setattr(store_jars, "fetch_delta_jars", lambda folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(store_jars, "compile_log_store", lambda jar, *_: compiled.append(jar.name))
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

    monkeypatch.setattr(store_jars, "resolved", nothing)
    with pytest.raises(ConfigError, match=r"Maven has no .*hadoop-aws-\*\.jar, which s3 needs"):
        fetch_jars(tmp_path / "jars", ["s3"])


def test_a_changed_log_store_is_compiled_again(tmp_path, s3_jars, monkeypatch):
    _, compiled = s3_jars
    source = tmp_path / "S3ConditionalLogStore.java"
    monkeypatch.setattr(store_jars, "LOG_STORE", source)
    for text in ("one", "other"):
        source.write_text(text)
        fetch_jars(tmp_path / "jars", ["s3"])
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["s4", "S3", ""])
def test_an_unknown_store_is_named_before_anything_is_fetched(tmp_path, s3_jars, name):
    with pytest.raises(ConfigError, match=r"no jars of a store .*: write s3 or azure"):
        fetch_jars(tmp_path / "jars", ["s3", name])
    assert not (tmp_path / "jars").exists()

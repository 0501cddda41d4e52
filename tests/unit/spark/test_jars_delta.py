"""Delta's jars are downloaded once, for the PySpark that is installed."""

import hashlib
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from waldelta.errors import ConfigError
from waldelta.spark import jars as jar_files
from waldelta.spark import settings
from waldelta.spark.jars import fetch_delta_jars

SUMS = jar_files.SUMS
DELTA = jar_files.DELTA_OF_SPARK["4.2"]
WANTED = {
    f"io.delta_delta-spark_4.2_2.13-{DELTA}.jar",
    "io.unitycatalog_unitycatalog-client-0.6.0.jar",
    "org.locationtech.jts_jts-core-1.20.0.jar",
    "org.roaringbitmap_RoaringBitmap-0.9.25.jar",
}

EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def maven(tmp_path, monkeypatch):
    """What Maven gives: the packages that were asked for, and the jars that it has."""
    asked, jars = [], {*WANTED, "org.apache.hadoop_hadoop-client-api-3.4.2.jar"}

    @contextmanager
    def resolved(*packages, **_):
        asked.append(packages)
        (folder := tmp_path / "ivy").mkdir(exist_ok=True)
        for name in jars:
            (folder / name).write_text("")
        yield folder

    monkeypatch.setattr(jar_files, "resolved", resolved)
    (sums := tmp_path / "sums").write_text(
        "".join(f"{EMPTY}  {name}\n" for name in (*WANTED, f"io.delta_delta-storage-{DELTA}.jar"))
    )
    monkeypatch.setattr(jar_files, "SUMS", sums)
    return asked, jars


def test_only_the_jars_that_pyspark_lacks_are_kept(tmp_path, maven):
    """Of one version, and once."""
    (folder := tmp_path / "jars").mkdir()
    (folder / "io.delta_delta-spark_4.2_2.13-4.0.0.jar").write_text("")
    for _ in range(2):
        fetch_delta_jars(folder)
        assert {jar.name for jar in folder.glob("*")} == WANTED
    assert maven[0] == [(f"io.delta:delta-spark_4.2_2.13:{DELTA}",)]


def test_the_users_own_jars_stay(tmp_path, maven):
    (folder := tmp_path / "jars").mkdir()
    for name in ("postgresql-42.7.jar", "org.example_io.delta_x-1.jar", "notes.txt"):
        (folder / name).write_text("mine")
    fetch_delta_jars(folder)
    mine = {path.name for path in folder.iterdir() if path.read_text() == "mine"}
    assert mine == {"postgresql-42.7.jar", "org.example_io.delta_x-1.jar", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == WANTED | mine


def test_a_killed_download_leaves_no_jar_that_counts(tmp_path, maven, monkeypatch):
    """At whichever jar; the next one completes the folder, without what the killed one left."""
    copy = shutil.copy2
    folder = tmp_path / "jars"
    for kill_at in range(1, len(WANTED) + 1):
        copied = iter(range(1, kill_at + 1))

        def kill(source, target, copied=copied, kill_at=kill_at):
            if next(copied) == kill_at:
                Path(target).write_text("half")
                raise KeyboardInterrupt
            return copy(source, target)

        monkeypatch.setattr(shutil, "copy2", kill)
        with pytest.raises(KeyboardInterrupt):
            fetch_delta_jars(folder)
        assert not [jar.name for jar in folder.glob("*.jar") if jar.read_text()]
    monkeypatch.setattr(shutil, "copy2", copy)
    fetch_delta_jars(folder)
    assert {path.name for path in folder.iterdir()} == WANTED


def test_a_jar_besides_delta_spark_is_fetched_after_a_kill(tmp_path, maven, monkeypatch):
    """Delta's main jar, by which a folder counts as complete, is copied last."""
    maven[1].add(f"io.delta_delta-storage-{DELTA}.jar")
    order, copy = [], shutil.copy2
    monkeypatch.setattr(
        shutil, "copy2", lambda source, target: order.append(source.name) or copy(source, target)
    )
    fetch_delta_jars(tmp_path / "jars")
    assert order[-1] == f"io.delta_delta-spark_4.2_2.13-{DELTA}.jar"
    assert len(order) == len(WANTED) + 1


def test_a_missing_jar_is_named(tmp_path, maven):
    maven[1].remove("org.locationtech.jts_jts-core-1.20.0.jar")
    with pytest.raises(ConfigError, match=r"no complete io\.delta:delta-spark.*jts-core"):
        fetch_delta_jars(tmp_path / "jars")


def test_a_spark_without_a_delta_is_refused_by_its_version(tmp_path, maven, monkeypatch):
    monkeypatch.setattr(jar_files, "version", lambda _: "4.9.1")
    with pytest.raises(ConfigError, match=r"PySpark 4\.9\.1 .* install PySpark 4\.0, 4\.1"):
        fetch_delta_jars(tmp_path / "jars")
    assert maven[0] == []


def test_without_pyspark_the_extra_is_named(tmp_path, monkeypatch):
    """Also where only its client is, which has no jars."""
    (client := tmp_path / "pyspark").mkdir()
    for found in (None, client):
        monkeypatch.setattr(settings, "_pyspark_folder", lambda found=found: found)
        with pytest.raises(ConfigError, match=r"pip install 'waldelta\[spark\]'"):
            fetch_delta_jars(tmp_path / "jars")


def test_a_folder_that_cant_be_made_is_named(tmp_path, maven):
    (tmp_path / "jars").write_text("a file")
    with pytest.raises(ConfigError, match=r"can't be written to .*set WALDELTA_JARS to it"):
        fetch_delta_jars(tmp_path / "jars" / "more")
    assert maven[0] == []


def test_an_unreachable_maven_is_named_with_what_ivy_said(tmp_path, monkeypatch):
    """And without spark-submit's own settings, which may lead elsewhere."""
    (spark := tmp_path / "spark" / "bin").mkdir(parents=True)
    program = spark / "spark-submit"
    program.write_text('#!/bin/sh\necho "$@ of $SPARK_HOME, $SPARK_CONF_DIR." >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("SPARK_CONF_DIR", "/elsewhere")
    monkeypatch.setattr(jar_files, "check_java", lambda: None)
    monkeypatch.setattr(jar_files, "pyspark_folder", lambda: spark.parent)
    with (
        pytest.raises(ConfigError, match="a:b:1 can't be fetched: let this machine reach") as told,
        jar_files.resolved("a:b:1", excluded=["c:d"]),
    ):
        pytest.fail("there is nothing to read")
    assert "--packages a:b:1 --exclude-packages c:d" in str(told.value)
    assert f"of {spark.parent}, ." in str(told.value)


def test_the_folder_of_an_installation_belongs_to_its_python(monkeypatch, tmp_path):
    """In a checkout it is in the cache of make setup."""
    monkeypatch.delenv("WALDELTA_JARS", raising=False)
    assert settings.jars_folder() == Path(__file__).parents[3] / ".cache" / "jars"
    monkeypatch.setattr(settings, "_CHECKOUT", tmp_path)
    monkeypatch.setattr("sys.prefix", "/venv")
    assert settings.jars_folder() == Path("/venv/share/waldelta/jars")
    monkeypatch.setenv("WALDELTA_JARS", "/mine")
    assert settings.jars_folder() == Path("/mine")


REFUSED = {
    "another sum": (f"{'0' * 64}  JAR\n", "JAR isn't the jar that waldelta was tested with"),
    "no sum": ("", rf"JAR \(SHA-256 {EMPTY}\) isn't in waldelta's table.*WALDELTA_JARS"),
}


@pytest.mark.parametrize(("line", "words"), REFUSED.values(), ids=REFUSED)
def test_a_jar_that_isnt_the_tables_is_refused_before_any_is_replaced(tmp_path, maven, line, words):
    """Whatever a mirror gives: its code would run with the source's password."""
    name = "org.roaringbitmap_RoaringBitmap-0.9.25.jar"
    others = jar_files.SUMS.read_text().replace(f"{EMPTY}  {name}\n", "")
    jar_files.SUMS.write_text(others + line.replace("JAR", name))
    (folder := tmp_path / "jars").mkdir()
    (folder / "io.delta_delta-spark_4.2_2.13-4.0.0.jar").write_text("earlier")
    with pytest.raises(ConfigError, match=words.replace("JAR", name, 1)):
        fetch_delta_jars(folder)
    assert [path.read_text() for path in folder.iterdir()] == ["earlier"]


def test_the_installed_jars_are_those_of_the_table():
    for jar in settings.jars_folder().glob("*.jar"):
        jar_files.check_jar(jar)
    wanted = [f"io.delta_delta-spark_{one}_2.13-{DELTA}.jar" for one in jar_files.DELTA_OF_SPARK]
    # Hadoop as PySpark 4.0, 4.1 and 4.2 have it.
    for hadoop in ("3.4.1", "3.4.2", "3.5.0"):
        wanted += [f"org.apache.hadoop_hadoop-{store}-{hadoop}.jar" for store in ("aws", "azure")]
    assert [name for name in wanted if name not in SUMS.read_text()] == []

"""Jars of Delta and of stores are downloaded once, for the installed PySpark and Java."""

import hashlib
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from waldelta.errors import ConfigError
from waldelta.spark import jars, settings
from waldelta.spark import jars as jar_files
from waldelta.spark.jars import check_java, fetch_delta_jars, fetch_jars
from waldelta.spark.settings import log_level, log_settings

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

    monkeypatch.setattr(jar_files, "resolve_packages", resolved)
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
        jar_files.resolve_packages("a:b:1", excluded=["c:d"]),
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


# What records the version in a Java's folder; what the error says, or None where Spark can start.
CASES = {
    "no Java anywhere": (None, "",
     r"JAVA_HOME isn't set, and there is no java on PATH: set JAVA_HOME, or install"),
    "JAVA_HOME without Java": (None, "home", r"JAVA_HOME is .*/home, which has no bin/java"),
    "Java 11": ('JAVA_VERSION="11.0.22"', "home",
     r"JAVA_HOME is .*, which is Java 11, and Spark needs 17 or later"),
    "Java 8": ('IMPLEMENTOR="x"\nJAVA_VERSION="1.8.0_392"', "home", r"which is Java 8, and"),
    "Java 11 on PATH": ('JAVA_VERSION="11.0.22"', "", r"java on PATH is .*, which is Java 11"),
    "Java 17": ('JAVA_VERSION="17.0.15"', "home", None),
    "Java 25 on PATH": ('JAVA_VERSION="25"', "", None),
    "a version that isn't recorded": ("", "home", None),
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder for a Java; nothing of this machine's Java and Spark is found."""
    for name in ("JAVA_HOME", "SPARK_CONF_DIR", "SPARK_HOME", "WALDELTA_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "home"


@pytest.mark.parametrize("release, variable, refused", CASES.values(), ids=CASES)
def test_java(home, monkeypatch, release, variable, refused):
    if variable:
        monkeypatch.setenv("JAVA_HOME", str(home))
    if release is not None:
        java = home / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.touch(mode=0o755)
        (home / "release").write_text(release)
        (home.parent / "bin").mkdir()
        (home.parent / "bin" / "java").symlink_to(java)
    if refused is None:
        check_java()
        return
    with pytest.raises(ConfigError, match=refused):
        check_java()


def test_a_spark_env_may_set_java_home(home, monkeypatch):
    """Spark's launcher reads it before it looks for Java."""
    monkeypatch.setenv("SPARK_HOME", str(home))
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "spark-env.sh").touch()
    check_java()


def test_the_driver_logs_without_traces_unless_asked(home, monkeypatch):
    """DEBUG, and a log4j2.properties of the user's own, leave Spark's log as Spark has it."""
    assert "log4j2.properties" in log_settings()["spark.driver.defaultJavaOptions"]
    monkeypatch.setenv("WALDELTA_LOG_LEVEL", "debug")
    assert (log_level(), log_settings()) == ("DEBUG", {"spark.log.level": "WARN"})
    monkeypatch.delenv("WALDELTA_LOG_LEVEL")
    monkeypatch.setenv("SPARK_CONF_DIR", str(home))
    home.mkdir()
    (home / "log4j2.properties").touch()
    assert log_settings() == {"spark.log.level": "WARN"}
    monkeypatch.setenv("WALDELTA_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="WALDELTA_LOG_LEVEL is 'LOUD': write one of DEBUG, INFO"):
        log_level()


STORE_JARS = (
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
        for name in (*STORE_JARS, "io.netty_netty-common-4.1.126.Final"):
            (folder / f"{name}.jar").write_text("")
        yield folder

    monkeypatch.setattr(jars, "resolve_packages", resolved)
    empty = hashlib.sha256(b"").hexdigest()
    (sums := tmp_path / "sums").write_text("".join(f"{empty}  {name}.jar\n" for name in STORE_JARS))
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


def test_a_missing_jar_of_a_store_is_named(tmp_path, s3_jars, monkeypatch):
    @contextmanager
    def nothing(*_, **__):
        (tmp_path / "ivy").mkdir()
        yield tmp_path / "ivy"

    monkeypatch.setattr(jars, "resolve_packages", nothing)
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

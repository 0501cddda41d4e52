"""Java is asked for before Spark's launcher runs, and Spark's driver logs without stack traces."""

import pytest

from waldelta.errors import ConfigError
from waldelta.spark.jars import check_java
from waldelta.spark.settings import log_level, log_settings

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

"""Which jars and log stores a session has, by what `waldelta jars` has put into its folder."""

from pathlib import Path

import pytest

from waldelta.errors import ConfigError
from waldelta.spark.connect_server import ConnectServer
from waldelta.spark.settings import S3_LOG_STORE, driver_settings, jars, local_settings

DELTA, SDK, LOG_STORE = "delta.jar", "s3/aws.jar", "s3/waldelta-log-store.jar"
IMPL = "spark.delta.logStore.s3a.impl"


@pytest.fixture
def have(tmp_path, monkeypatch):
    """Puts jars into the folder of jars."""

    def put(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()

    monkeypatch.setenv("WALDELTA_JARS", str(tmp_path))
    return put


def test_a_session_has_deltas_jars_and_those_of_stores(have, tmp_path):
    """Those of Delta must be there."""
    have(SDK, LOG_STORE)
    with pytest.raises(ConfigError, match=r"no Delta jars in .*: run `waldelta jars`"):
        jars()
    have(DELTA)
    assert [str(jar.relative_to(tmp_path)) for jar in jars()] == [DELTA, SDK, LOG_STORE]


def test_a_session_commits_on_s3_by_the_log_store_that_it_has(have):
    have(DELTA, SDK)
    assert IMPL not in driver_settings()
    have(LOG_STORE)
    settings = driver_settings()
    assert settings[IMPL] == settings["spark.delta.logStore.s3.impl"] == S3_LOG_STORE


@pytest.mark.parametrize(
    "line, is_ours",
    [
        ("spark.delta.logStore.s3a.impl org.example.LogStore", False),
        ("# spark.delta.logStore.s3a.impl org.example.LogStore", True),
        ("spark.ui.enabled false", True),
    ],
)
def test_the_operators_log_store_comes_first(have, tmp_path, monkeypatch, line, is_ours):
    have(DELTA, LOG_STORE)
    (tmp_path / "spark-defaults.conf").write_text(f"spark.executor.cores 1\n{line}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert (IMPL in driver_settings()) is is_ours


def test_the_connect_server_does_so_too(have, tmp_path):
    """And its ports refuse strangers."""
    have(DELTA, LOG_STORE)
    settings = ConnectServer(tmp_path / "spark").settings()
    assert settings[IMPL] == S3_LOG_STORE
    assert settings["spark.jars"].endswith(LOG_STORE)
    assert settings["spark.authenticate"] == "true"


MASTERS = {
    "local": True,
    "local[4]": True,
    "local[*]": True,
    "local[*,4]": True,
    # Each of these needs a secret that its operator distributes.
    "local-cluster[2,1,1024]": False,
    "spark://master:7077": False,
    "yarn": False,
    "k8s://https://host": False,
}


@pytest.mark.parametrize(("master", "authenticates"), MASTERS.items())
def test_the_ports_of_a_local_driver_refuse_strangers(master, authenticates):
    """Without a secret among the settings, which arguments and files show."""
    settings = local_settings(master)
    assert settings.get("spark.authenticate") == ("true" if authenticates else None)
    assert not [name for name in settings if "secret" in name]


def test_the_log_store_is_where_its_class_is_named():
    """Java's compiler and the wheel take it from there."""
    source = Path(__file__).parents[3] / "include" / (S3_LOG_STORE.replace(".", "/") + ".java")
    package, _, name = S3_LOG_STORE.rpartition(".")
    text = source.read_text()
    assert f"package {package};" in text
    assert f"public class {name} " in text

"""What ``doctor`` finds in an installation: packages, Java, jars, variables."""

from importlib.metadata import version

import pytest

from waldelta.cli.doctor import check_packages, installation_checks, run_check
from waldelta.spark.jars import delta_artifact

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

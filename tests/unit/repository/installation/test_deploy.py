"""The files of include/deploy agree with each other, with the pins and with what Airflow offers."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from airflow.cli.cli_parser import get_parser

from tests.unit.repository.installation.test_requirements import dependencies, pins, project
from waldelta.config.pipeline_folder import PIPELINES_VARIABLE
from waldelta_airflow import settings

REPOSITORY = Path(__file__).parents[4]
DEPLOY = REPOSITORY / "include/deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PAGE = (REPOSITORY / "docs/how-to/deploy.md").read_text()


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yml").read_text())


@pytest.fixture(scope="module")
def helm() -> dict:
    return yaml.safe_load((DEPLOY / "helm-values.yml").read_text())


def image_variables() -> dict[str, str]:
    (line,) = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
    return dict(part.split("=") for part in line.split())


def test_the_image_has_the_pinned_airflow(helm):
    version = pins()["apache-airflow"]
    (base,) = re.findall(r"^FROM apache/airflow:([\d.]+)-python([\d.]+)$", DOCKERFILE, re.MULTILINE)
    assert (base[0], helm["airflowVersion"]) == (version, version)
    classifiers = project()["project"]["classifiers"]
    assert f"Programming Language :: Python :: {base[1]}" in classifiers


def test_the_image_installs_extras_that_the_wheel_has():
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", DOCKERFILE)
    assert dependencies(*extras.split(","))


def test_the_image_ends_as_the_user_of_airflow():
    """Whoever may write to root's files in the container could change what tasks run."""
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE) == ["root", "airflow"]


def without_comments(lines: list[str]) -> list[str]:
    return [line.partition("#")[0].strip() for line in lines]


def test_the_dag_file_of_the_image_is_the_one_of_the_page():
    (words,) = re.findall(r"printf '%s\\n' (.*?) >", DOCKERFILE.replace("\\\n", ""), re.DOTALL)
    lines = shlex.split(words)
    page = (REPOSITORY / "docs/how-to/run-in-airflow.md").read_text()
    wanted = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert without_comments(lines) == without_comments(wanted.strip().splitlines())
    assert any("DAG" in line for line in lines)


def test_variables_are_ours(compose, helm):
    """A misspelt one would have no effect."""
    given = {*image_variables(), *(entry["name"] for entry in helm["env"])}
    given |= {name for name in compose["x-airflow"]["environment"] if name.startswith("WALDELTA")}
    known = {settings.ALERTS_VARIABLE, PIPELINES_VARIABLE, "WALDELTA_JARS"}
    assert given == known


def test_pipelines_are_mounted_where_the_image_reads_them(compose, helm):
    folder = image_variables()[PIPELINES_VARIABLE]
    mounts = [volume.split(":") for volume in compose["x-airflow"]["volumes"]]
    assert ["./pipelines", folder, "ro"] in mounts
    (mount,) = helm["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == (folder, True)
    assert [volume["name"] for volume in helm["volumes"]] == [mount["name"]]
    assert {entry["name"]: entry["value"] for entry in helm["env"]}["WALDELTA_PIPELINES"] == folder


def test_compose_has_what_airflow_needs(compose):
    """Its commands exist, each waits for the database, and named volumes are declared."""
    services = compose["services"]
    assert services.keys() == {"postgres", "init", "api-server", "scheduler", "dag-processor"}
    for name in services.keys() - {"postgres"}:
        command, *arguments = services[name]["command"]
        assert command == "airflow"
        assert get_parser().parse_args(arguments).func
    assert services["init"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["scheduler"]["depends_on"].keys() == {"init"}
    named = {
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    assert named == compose["volumes"].keys()


def test_no_file_has_a_secret(compose, helm):
    """Compose refuses to start without them; Kubernetes reads them from a secret."""
    text = (DEPLOY / "compose.yml").read_text()
    secrets = set(re.findall(r"\$\{(\w+):\?", text))
    assert secrets == {"POSTGRES_PASSWORD", "JWT_SECRET", "API_SECRET_KEY", "FERNET_KEY"}
    assert all(name in text.split("x-airflow")[0] for name in secrets)
    connections = helm["workers"]["kubernetes"]["env"]
    assert all(entry["name"].startswith("AIRFLOW_CONN_") for entry in connections)
    assert all(entry["valueFrom"].keys() == {"secretKeyRef"} for entry in connections)


def environment(service: dict) -> dict[str, str]:
    return service.get("environment", {})


def test_every_key_of_airflow_has_a_secret_of_its_own(compose):
    """Who learns one key could otherwise sign with another."""
    for name, service in compose["services"].items():
        required = re.compile(r"\$\{(\w+):\?")
        used = [key for value in environment(service).values() for key in required.findall(value)]
        assert len(used) == len(set(used)), name


# Who else has a secret could lose it, and has no use for it.
NEED = {
    "AIRFLOW__API__SECRET_KEY": {"api-server", "scheduler"},
    "AIRFLOW__API_AUTH__JWT_SECRET": {"api-server", "scheduler"},
    "connections.env": {"scheduler"},
    "store.env": {"api-server", "scheduler"},
    "lake": {"api-server", "scheduler"},
}


@pytest.mark.parametrize("what", NEED)
def test_only_the_containers_that_need_a_secret_have_it(compose, what):
    having = {
        name
        for name, service in compose["services"].items()
        if what in environment(service)
        or what in [file["path"] for file in service.get("env_file", ())]
        or what in [volume.split(":")[0] for volume in service.get("volumes", ())]
    }
    assert having == NEED[what]


def test_only_the_chart_s_workers_have_the_password_of_the_source(helm):
    assert "secret" not in helm
    assert not [entry for entry in helm["env"] if entry["name"].startswith("AIRFLOW_CONN_")]


def test_the_page_names_every_file():
    assert [file.name for file in DEPLOY.iterdir() if f"`{file.name}`" not in PAGE] == []

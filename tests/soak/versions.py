"""Whether the wheel works with the versions that its metadata allow: ``python -m
tests.soak.versions`` tries all and writes docs/reference/versions.md; ``--only 1,2`` some.

Each combination gets an environment of its own, made by uv as a team would make it. There Airflow
parses the DAGs, and ``airflow standalone`` runs those of setup, initial sync, CDC and
reconciliation on a PostgreSQL of the version. At the end the target has the source's rows, and the
pipeline's page opens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx
import psutil
import psycopg
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from demo.airflow_client import AirflowClient, AirflowError
from tests.support.fixtures.postgres import new_postgres
from tests.support.other_python import build_distributions, make_team
from tests.support.waiting import wait_until
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, free_port

PAGE: Final = Path(__file__).parents[2] / "docs/reference/versions.md"
_HEADINGS: Final = "| Python | Airflow | Spark | PostgreSQL | result |"
_KINDS: Final = ("setup", "initial_sync", "cdc", "reconcile")
# Without a schedule: the run that is triggered is the only one.
_PIPELINE: Final = """\
pipeline: shop
schedule: null
source:
  conn_id: shop_source
  slot: shop_cdc
  publications:
    - {name: shop_pub, tables: [{name: public.orders, where: amount > 5}]}
target: {root: "%s"}
"""


@dataclass(frozen=True, slots=True)
class Versions:
    """One combination; ``refused`` is a part of the message where one of them isn't supported."""

    python: str
    airflow: str
    spark: str
    postgres: int
    refused: str = ""

    def __str__(self) -> str:
        return (
            f"Python {self.python}, Airflow {self.airflow}, Spark {self.spark},"
            f" PostgreSQL {self.postgres}"
        )


# Every pair of supported versions is in one of the first twelve.
COMBINATIONS: Final = (
    Versions("3.11", "3.1.8", "4.0.4", 15),
    Versions("3.12", "3.2.2", "4.1.3", 15),
    Versions("3.13", "3.3.2", "4.2.0", 15),
    Versions("3.12", "3.3.2", "4.0.4", 16),
    Versions("3.13", "3.1.8", "4.1.3", 16),
    Versions("3.11", "3.2.2", "4.2.0", 16),
    Versions("3.13", "3.2.2", "4.0.4", 17),
    Versions("3.11", "3.3.2", "4.1.3", 17),
    Versions("3.12", "3.1.8", "4.2.0", 17),
    Versions("3.11", "3.3.2", "4.0.4", 18),
    Versions("3.12", "3.1.8", "4.1.3", 18),
    Versions("3.13", "3.2.2", "4.2.0", 18),
    Versions("3.12", "3.0.6", "4.2.0", 18, refused="Airflow 3.0.6 is installed"),
)

# What Airflow's constraints file of a version pins, because newer ones break Airflow itself.
_CONSTRAINTS: Final = MappingProxyType({"3.2.2": ("fastapi==0.136.3", "cadwyn==6.2.2")})


class Failed(Exception):
    """A step of a combination ended in another way than it should; the message has its output."""


def try_versions(versions: Versions, wheel: Path, folder: Path) -> None:
    """Try one combination in an empty folder; raises Failed when it doesn't work."""
    python = _install(versions, wheel, folder / "venv")
    server = new_postgres(versions.postgres, {"fsync": "off"})
    try:
        team = _Team(folder, python.parent, server.start())
        team.run("airflow", "db", "migrate")
        errors = team.import_errors()
        if versions.refused:
            _require(versions.refused in errors, f"the version isn't refused: {errors}")
        else:
            _require("shop.py" not in errors, f"the DAGs can't be parsed: {errors}")
            team.run("waldelta", "jars")
            team.run("waldelta", "airflow", "setup")
            _replicate(team, server)
    finally:
        server.delete()


def _replicate(team: _Team, server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as source, team.airflow() as client:
        source.execute("create table orders (id int primary key, amount int, note text)")
        source.execute("alter table orders replica identity full")
        source.execute("insert into orders select i, i, 'copied' from generate_series(1, 20) i")
        client.wait_for_dags([f"shop_{kind}" for kind in _KINDS])
        _run_dag(client, "setup")
        _run_dag(client, "initial_sync")
        source.execute("update orders set amount = 0 where id = 7")  # leaves the filter
        source.execute("update orders set amount = 70 where id = 3")  # comes into it
        source.execute("delete from orders where id = 8")
        source.execute("insert into orders values (21, 21, 'changed')")
        _run_dag(client, "cdc")
        _run_dag(client, "reconcile")
        wanted = source.execute("select id, amount from orders where amount > 5 order by id")
        rows = DeltaTable(f"{team.lake}/public/orders").to_pyarrow_table(columns=["id", "amount"])
        found = [tuple(row.values()) for row in rows.sort_by("id").to_pylist()]
        _require(found == wanted.fetchall(), f"the target has {found}")
        page = client.page("/waldelta/p/shop")
        _require("public.orders" in page, f"the pipeline's page is {page[:500]}")


class _Team:
    """A team's folders, and the environment of its processes."""

    def __init__(self, folder: Path, programs: Path, server: EmbeddedPostgres) -> None:
        self.folder, self.programs = folder, programs
        self.lake = folder / "lake"
        self.environment = make_team(folder, _PIPELINE % self.lake.as_uri()) | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW_CONN_SHOP_SOURCE": server.uri(),
            "AIRFLOW_CONN_WALDELTA_SPARK": '{"conn_type": "spark", "host": "local[2]"}',
            "WALDELTA_JARS": str(folder / "jars"),
            "WALDELTA_RETRY_DELAY": "1",
        }

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints; raises Failed with it when it fails."""
        command = [str(self.programs / program), *arguments]
        return _run(command, self.folder, self.environment)

    @contextmanager
    def airflow(self) -> Iterator[AirflowClient]:
        """A client of this Airflow, while ``airflow standalone`` runs all of its processes."""
        url = f"http://127.0.0.1:{free_port()}"
        passwords, log = self.folder / "passwords.json", self.folder / "standalone.log"
        passwords.write_text(json.dumps({"admin": "admin"}))
        settings = {
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": url.rpartition(":")[2],
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__CORE__PARALLELISM": "2",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        }
        command = [str(self.programs / "airflow"), "standalone"]
        with log.open("w") as written, AirflowClient(url, "admin", "admin") as client:
            standalone = psutil.Popen(
                command,
                cwd=self.folder,
                env=self.environment | settings,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_until(lambda: _is_healthy(client), timeout_s=180)
                yield client
            except (AirflowError, AssertionError, DeltaError, httpx.HTTPError) as err:
                raise Failed(f"{err}\n{log.read_text()[-20_000:]}") from err
            finally:
                for process in [*standalone.children(recursive=True), standalone]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                standalone.wait()

    def import_errors(self) -> str:
        """Have Airflow parse the DAGs, and return what it says of those that it couldn't."""
        self.run("airflow", "dags", "reserialize")
        return self.run("airflow", "dags", "list-import-errors", "--output", "yaml")


def _is_healthy(client: AirflowClient) -> bool:
    try:
        health = client.health()
    except httpx.HTTPError:
        return False
    parts = "metadatabase", "scheduler", "dag_processor"
    return all(health[part]["status"] == "healthy" for part in parts)


def _run_dag(client: AirflowClient, kind: str) -> None:
    client.unpause(f"shop_{kind}")
    client.run_to_end(f"shop_{kind}", timeout_s=900)


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


def _run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    # Airflow lists import errors with exit code 1.
    allowed = (0, 1) if "list-import-errors" in command else (0,)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in allowed:
        end = (done.stdout + done.stderr)[-20000:]
        raise Failed(f"{' '.join(command[:4])} ended with {done.returncode}:\n{end}")
    return done.stdout


def _install(versions: Versions, wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel, Airflow and PySpark of the versions."""
    uv = [sys.executable, "-m", "uv"]
    environment = dict(os.environ)
    _run([*uv, "venv", "--python", versions.python, str(folder)], folder.parent, environment)
    python = folder / "bin" / "python"
    pins = [
        f"apache-airflow=={versions.airflow}",
        f"pyspark=={versions.spark}",
        f"pyspark-client=={versions.spark}",
        *_CONSTRAINTS.get(versions.airflow, ()),
    ]
    install = [*uv, "pip", "install", "--python", str(python)]
    own = f"waldelta[airflow,spark] @ {wheel.as_uri()}"
    # A refused version isn't in the metadata's range, so the wheel is added without asking.
    if versions.refused:
        _run([*install, *pins], folder.parent, environment)
        _run([*install, "--no-deps", str(wheel)], folder.parent, environment)
        _run([*install, "psycopg[binary]", "pydantic", "sqlglot"], folder.parent, environment)
    else:
        _run([*install, own, *pins], folder.parent, environment)
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    """Try combinations one after the other; returns 0 when all work or are refused by name."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.versions")
    parser.add_argument("--only", metavar="N,N", help="numbers of combinations, from 1")
    asked = parser.parse_args(arguments)
    numbers = [int(text) for text in asked.only.split(",")] if asked.only else None
    results: dict[Versions, str] = {}
    with tempfile.TemporaryDirectory(prefix="waldelta-versions-") as made:
        _, wheel = build_distributions(Path(made) / "dist")
        for number, versions in enumerate(COMBINATIONS, start=1):
            if numbers is not None and number not in numbers:
                continue
            folder, began = Path(made) / str(number), time.monotonic()
            folder.mkdir()
            try:
                try_versions(versions, wheel, folder)
                results[versions] = "refused" if versions.refused else "works"
            except Failed as err:
                results[versions] = "fails"
                print(err, file=sys.stderr)
            shutil.rmtree(folder)
            seconds = time.monotonic() - began
            print(f"{number}. {versions}: {results[versions]} ({seconds:.0f} s)", flush=True)
            _write_page(results)
    return int("fails" in results.values())


def _write_page(results: dict[Versions, str]) -> None:
    """The table is the page's last part; what wasn't tried this time keeps its result."""
    before, _, rows = PAGE.read_text().partition(_HEADINGS)
    known = {
        one: row.split("|")[-2].strip()
        for one, row in zip(COMBINATIONS, rows.splitlines()[2:], strict=True)
    }
    PAGE.write_text(before + table(known | results))


def table(results: dict[Versions, str]) -> str:
    """The page's table of results."""
    lines = [_HEADINGS, "| --- " * 5 + "|"]
    lines += [
        f"| {one.python} | {one.airflow} | {one.spark} | {one.postgres} | {result} |"
        for one, result in results.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

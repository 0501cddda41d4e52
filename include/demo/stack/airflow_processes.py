"""Airflow in the embedded stack: scheduler, API server, DAG processor and triggerer on
PostgreSQL.
"""

from __future__ import annotations

import base64
import configparser
import io
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import httpx

from demo.stack.processes import Part, StackError, finish, start

USER = "admin"
SCHEDULER, TRIGGERER = "scheduler", "triggerer"
PARTS = {
    "api-server": ["api-server", "--host", "127.0.0.1", "--workers", "1"],
    # The API server reads the task logs from the same disk, so the scheduler needs no port to serve
    # them.
    SCHEDULER: ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    # None of our DAGs needs it. Without it, Airflow's home page shows an error, and a user's own
    # DAGs may wait forever.
    TRIGGERER: ["triggerer", "--skip-serve-logs"],
}


def _token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, repr=False)
class StackSecrets:
    """Every secret of one stack.

    They live as long as its data, since the metadata database is encrypted with one of them.
    """

    admin_password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    airflow_database: str = field(default_factory=_token)
    source: str = field(default_factory=_token)
    spark_token: str = field(default_factory=_token)
    store: str = field(default_factory=_token)
    fernet_key: str = field(
        default_factory=lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
    )
    jwt_secret: str = field(default_factory=lambda: secrets.token_urlsafe(64))
    api_secret: str = field(default_factory=_token)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file, or create it; one of an earlier version gets the secrets that it lacks."""
        entries = json.loads(path.read_text()) if path.exists() else {}
        stack_secrets = cls(**entries)
        if asdict(stack_secrets) != entries:
            write_private(path, json.dumps(asdict(stack_secrets), indent=1) + "\n")
        return stack_secrets


@dataclass(frozen=True, repr=False)
class AirflowProcesses:
    """One Airflow: ``home`` is private, ``database`` the SQLAlchemy URL of its metadata."""

    home: Path
    logs: Path
    port: int
    database: str
    secrets: StackSecrets
    dags: Path
    plugins: Path
    parallelism: int = 4
    triggerer: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of Airflow's processes.

        Everything else is in airflow.cfg, which other users can't read.
        """
        return {**base, "AIRFLOW_HOME": str(self.home)}

    def configure(self) -> None:
        """Write airflow.cfg and the passwords file, both readable by their owner only."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        parser = configparser.RawConfigParser()
        parser.read_dict(self.configuration())
        text = io.StringIO()
        parser.write(text)
        # A configuration file needs literal percent signs doubled.
        write_private(self.home / "airflow.cfg", text.getvalue().replace("%", "%%"))
        write_private(self._passwords, json.dumps({USER: self.secrets.admin_password}) + "\n")

    def migrate(self, environment: Mapping[str, str]) -> None:
        """Migrate the metadata database to this version's schema, unless that was done before."""
        stamp = self.home / "migrated"
        wanted = (
            f"{version('apache-airflow-core')} {self.database.rpartition('@')[2].partition('/')[2]}"
        )
        if stamp.exists() and stamp.read_text() == wanted:
            return
        finish(self._run("db-migrate", ["db", "migrate"], environment), timeout_s=180)
        stamp.write_text(wanted)

    def start(self, environment: Mapping[str, str]) -> list[Part]:
        """Start all but the scheduler, which must be started once the API server ``answers``."""
        later = {SCHEDULER} if self.triggerer else {SCHEDULER, TRIGGERER}
        return [
            self._run(name, arguments, environment)
            for name, arguments in PARTS.items()
            if name not in later
        ]

    def start_scheduler(self, environment: Mapping[str, str]) -> Part:
        """Start the scheduler; everything is ready when ``is_healthy``.

        Its tasks call the API server as soon as they start. A task without an answer is killed, and
        retried only after its retry delay.
        """
        return self._run(SCHEDULER, PARTS[SCHEDULER], environment)

    def answers(self) -> bool:
        """Returns whether the API server answers."""
        return self._health() is not None

    def is_healthy(self, since: datetime) -> bool:
        """Returns whether the API answers, and scheduler and DAG processor have sent a heartbeat
        since then.
        """
        if (health := self._health()) is None:
            return False
        beats = (
            health["scheduler"]["latest_scheduler_heartbeat"],
            (health.get("dag_processor") or {}).get("latest_dag_processor_heartbeat"),
        )
        return all(beat and datetime.fromisoformat(beat).astimezone(UTC) >= since for beat in beats)

    def _health(self) -> dict[str, Any] | None:
        try:
            answer = httpx.get(f"{self.url}/api/v2/monitor/health", timeout=5, trust_env=False)
            return dict(answer.raise_for_status().json())
        except (httpx.HTTPError, ValueError):
            return None

    def configuration(self) -> dict[str, dict[str, str]]:
        """Returns Airflow's settings by section, where they differ from Airflow's defaults."""
        return {
            "core": {
                "executor": "LocalExecutor",
                "parallelism": str(self.parallelism),
                "load_examples": "False",
                "dags_folder": str(self.dags),
                "plugins_folder": str(self.plugins),
                "fernet_key": self.secrets.fernet_key,
                "simple_auth_manager_users": f"{USER}:admin",
                "simple_auth_manager_passwords_file": str(self._passwords),
                # Tasks report to this address; Airflow's default is port 8080 whatever the API
                # server's port is.
                "execution_api_server_url": f"{self.url}/execution/",
            },
            "database": {"sql_alchemy_conn": self.database},
            "api": {
                "base_url": self.url,
                "host": "127.0.0.1",
                "port": str(self.port),
                "workers": "1",
                "secret_key": self.secrets.api_secret,
            },
            "api_auth": {"jwt_secret": self.secrets.jwt_secret},
            "logging": {
                "base_log_folder": str(self.logs / "tasks"),
                "dag_processor_child_process_log_directory": str(self.logs / "dag_processor"),
            },
            # On average, half of it passes between two tasks of a run.
            "scheduler": {"scheduler_idle_sleep_time": "0.2"},
            "dag_processor": {"refresh_interval": "10", "min_file_process_interval": "10"},
            "usage_data_collection": {"enabled": "False"},
        }

    @property
    def _passwords(self) -> Path:
        return self.home / "passwords.json"

    def _run(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> Part:
        program = Path(sys.executable).with_name("airflow")
        if not program.exists():
            raise StackError(f"{program} is missing: run `make setup`")
        extra = ["--port", str(self.port)] if name == "api-server" else []
        return start(f"Airflow {name}", [str(program), *arguments, *extra], folder=self.home,
                     log=self.logs / f"airflow-{name}.log", environment=environment)  # fmt: skip


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read from the beginning."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)

"""A local S3 server, for the demo and the tests: SeaweedFS, a program in a wheel, which checks keys
and permissions.

It listens on loopback only. The gRPC ports of its inner parts ask for no key.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from demo.stack.airflow_processes import write_private
from demo.stack.processes import Part, StackError, start, stop, wait_until
from waldelta.rehearsal.embedded_postgres import free_port

REGION = "us-east-1"
START_S = 60.0
_READY = "ready"


@dataclass(frozen=True)
class Identity:
    """Who a client of the store is."""

    access_key: str
    secret_key: str = field(repr=False)


@cache
def s3_client(endpoint: str, identity: Identity) -> Any:
    """Returns a client of a server that repeats no request; threads can share it."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=identity.access_key,
        aws_secret_access_key=identity.secret_key,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


class S3Server:
    """A server in ``folder`` on free ports of this machine; a context manager that starts and kills
    it.

    Its ports stay the same when it is started again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.log = folder / "server.log"
        self._part: Part | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self, environment: Mapping[str, str] = os.environ) -> Part:
        """Start the server; it answers as soon as is_up()."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._part = start(
            type(self).__name__,
            self._command(),
            folder=self.folder,
            log=self.log,
            environment=environment,
        )
        return self._part

    def start(self) -> Self:
        """Start the server and wait until it answers requests."""
        part = self.begin()
        wait_until(self.is_up, part.name, START_S, [part])
        return self

    def stop(self) -> None:
        """End the server as an operator does, and wait until it has ended."""
        if self._part is not None:
            stop([self._part], grace_s=20)
            self._part = None

    def kill(self) -> None:
        """End the server in the middle of whatever it does."""
        if self._part is not None:
            os.kill(self._part.pid, signal.SIGKILL)
            stop([self._part], grace_s=0)
            self._part = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def is_up(self) -> bool:
        with suppress(BotoCoreError, ClientError):
            return self._is_ready()
        return False

    def _command(self) -> Sequence[str]:
        """Returns the program and its arguments."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """Returns whether the server does all that clients ask of it; an error means: not yet."""
        raise NotImplementedError


class SeaweedFS(S3Server):
    """A SeaweedFS in one process, which keeps its data in ``folder``.

    ``admin`` may do everything. ``others`` are further identities with their actions.
    """

    def __init__(
        self, folder: Path, admin: Identity, others: Mapping[Identity, Sequence[str]] | None = None
    ) -> None:
        super().__init__(folder)
        self.admin = admin
        self._others = others or {}
        self._ports = {
            f"{part}.{kind}": free_port()
            for part in ("master", "volume", "filer")
            for kind in ("port", "port.grpc")
        }
        self._ports["s3.port.grpc"] = free_port()
        self.filer_port = self._ports["filer.port"]

    def _command(self) -> Sequence[str]:
        (self.folder / "data").mkdir(exist_ok=True)
        identities = self.folder / "identities.json"
        may = [_may(self.admin, ["Admin"]), *(_may(*other) for other in self._others.items())]
        write_private(identities, json.dumps({"identities": may}))
        # The server reads this file in its working directory. Without keys, the filer's port lets
        # everybody on this machine read and write.
        parts = ("signing", "signing.read", "filer_signing", "filer_signing.read")
        keys = (f'[jwt.{part}]\nkey = "{secrets.token_hex(32)}"\n' for part in parts)
        write_private(self.folder / "security.toml", "".join(keys))
        own = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": self.port,
            "s3.config": identities,
            # These belong to services that no client uses, on ports that other servers may have.
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            # Without these, a restart takes ten seconds longer: there is one master only.
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms",
            "master.resumeState": "false",
            "volume.preStopSeconds": 0,
            # Small volumes, as many as needed: each bucket has volumes of its own.
            "master.volumeSizeLimitMB": 64,
            "volume.max": 0,
        }
        program = Path(sys.executable).with_name("weed")
        if not program.exists():
            raise StackError(f"{program} is missing: run `make setup`")
        options = [f"-{name}={value}" for name, value in (self._ports | own).items()]
        return [str(program), "server", "-filer", "-s3", *options]

    def _is_ready(self) -> bool:
        """Returns whether an object can be written and deleted: the parts start one by one."""
        client = s3_client(self.endpoint, self.admin)
        with suppress(ClientError):  # An earlier attempt has created it.
            client.create_bucket(Bucket=_READY)
        client.put_object(Bucket=_READY, Key="object", Body=b"content")
        client.delete_object(Bucket=_READY, Key="object")
        return True


def _may(identity: Identity, actions: Sequence[str]) -> dict[str, Any]:
    """Returns an entry of SeaweedFS's identities file."""
    keys = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
    return {"name": identity.access_key, "credentials": [keys], "actions": list(actions)}

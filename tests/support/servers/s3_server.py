"""S3 servers for tests: SeaweedFS, which checks keys and permissions, and moto, an independent
implementation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from demo.embedded_postgres import free_port
from demo.stack.processes import Part, start, stop, wait_until

REGION = "us-east-1"
START_S = 60.0


@dataclass(frozen=True)
class Identity:
    """Who a client of the store is."""

    access_key: str
    secret_key: str = field(repr=False)


ADMIN = Identity("admin", "admin-secret")
READER = Identity("reader", "reader-secret")


@dataclass(frozen=True)
class Bucket:
    """A bucket as one identity sees it, by an address which may be a proxy's."""

    endpoint: str
    name: str
    identity: Identity = ADMIN

    def at(self, endpoint: str) -> Bucket:
        """Return the same bucket by another address."""
        return replace(self, endpoint=endpoint)

    def seen_by(self, identity: Identity) -> Bucket:
        """Return the same bucket for another identity."""
        return replace(self, identity=identity)

    def uri(self, path: str, scheme: str = "s3a") -> str:
        """Return the URI of an object or folder."""
        return f"{scheme}://{self.name}/{path}"

    @property
    def storage_options(self) -> dict[str, str]:
        """The options of delta-rs, which are environment variables, too."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.identity.access_key,
            "AWS_SECRET_ACCESS_KEY": self.identity.secret_key,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def hadoop_settings(self) -> dict[str, str]:
        """The settings of Hadoop's S3A for this bucket alone: one session can have several."""
        own = {
            "endpoint": self.endpoint,
            "endpoint.region": REGION,
            "path.style.access": "true",
            "access.key": self.identity.access_key,
            "secret.key": self.identity.secret_key,
        }
        return {f"fs.s3a.bucket.{self.name}.{name}": value for name, value in own.items()}

    def configure(self, spark: Any) -> None:
        """Have a session reach the bucket as this identity by this address, before its first use.

        Hadoop keeps what it has opened.
        """
        for name, value in self.hadoop_settings.items():
            spark.conf.set(name, value)

    @property
    def client(self) -> Any:
        """A client of the store that repeats no request; threads can share it."""
        return _client(self.endpoint, self.identity)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the names of the objects below a prefix, in order."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists; returns whether it was written."""
        try:
            self.client.put_object(Bucket=self.name, Key=key, Body=content, IfNoneMatch="*")
        except ClientError as err:
            if err.response["ResponseMetadata"]["HTTPStatusCode"] != 412:
                raise
            return False
        return True

    def read(self, key: str) -> bytes:
        """Return the content of an object."""
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content


@cache
def _client(endpoint: str, identity: Identity) -> Any:
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

    def start(self) -> Self:
        """Start the server and wait until it answers requests."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = type(self).__name__
        self._part = start(
            name, self._command(), folder=self.folder, log=self.log, environment=os.environ
        )
        wait_until(self._is_up, name, START_S, [self._part])
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

    def restart(self) -> None:
        """Kill the server and start it again."""
        self.kill()
        self.start()

    def new_bucket(self, name: str = "") -> Bucket:
        """Create an empty bucket, by default with a name that no other one has."""
        bucket = Bucket(self.endpoint, name or f"test-{uuid.uuid4().hex[:12]}")
        bucket.client.create_bucket(Bucket=bucket.name)
        return bucket

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _is_up(self) -> bool:
        with suppress(BotoCoreError, ClientError):
            return self._is_ready()
        return False

    def _command(self) -> Sequence[str]:
        """Return the program and its arguments."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """Return whether the server does what tests ask of it; an error means: not yet."""
        raise NotImplementedError


class SeaweedFS(S3Server):
    """A SeaweedFS in one process, which keeps its data in ``folder``.

    ADMIN may do everything, READER may read and list.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports = {
            f"{part}.{kind}": free_port()
            for part in ("master", "volume", "filer")
            for kind in ("port", "port.grpc")
        }
        self._ports["s3.port.grpc"] = free_port()

    def _command(self) -> Sequence[str]:
        (self.folder / "data").mkdir(exist_ok=True)
        identities = self.folder / "identities.json"
        identities.write_text(
            json.dumps({"identities": [_may(ADMIN, "Admin"), _may(READER, "Read", "List")]})
        )
        own = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": self.port,
            "s3.config": identities,
            # These belong to services that no test uses, on ports that other servers may have.
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
        options = [f"-{name}={value}" for name, value in (self._ports | own).items()]
        return [str(Path(sys.executable).with_name("weed")), "server", "-filer", "-s3", *options]

    def _is_ready(self) -> bool:
        """Return whether an object can be written and deleted: the parts start one by one."""
        client = Bucket(self.endpoint, "ready").client
        with suppress(ClientError):  # An earlier attempt has created it.
            client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="object", Body=b"content")
        client.delete_object(Bucket="ready", Key="object")
        return True


def _may(identity: Identity, *actions: str) -> dict[str, Any]:
    """Return an entry of SeaweedFS's identities file."""
    keys = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
    return {"name": identity.access_key, "credentials": [keys], "actions": list(actions)}


class Moto(S3Server):
    """A moto server, which keeps objects in memory and lets everybody do everything."""

    def _command(self) -> Sequence[str]:
        program = str(Path(sys.executable).with_name("moto_server"))
        return [program, "-H", "127.0.0.1", "-p", str(self.port)]

    def _is_ready(self) -> bool:
        Bucket(self.endpoint, "").client.list_buckets()
        return True

"""S3 servers for tests: SeaweedFS, which checks keys, and moto."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from demo import s3_server
from demo.s3_server import REGION, Identity, s3_client

ADMIN = Identity("admin", "admin-secret")
READER = Identity("reader", "reader-secret")
WRITER = Identity("writer", "writer-secret")


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

    def configure(self, runner: Any) -> None:
        """Have a session reach the bucket as this identity by this address, before its first use.

        Hadoop keeps what it has opened.
        """
        for name, value in self.hadoop_settings.items():
            runner.spark().conf.set(name, value)

    @property
    def client(self) -> Any:
        """A client of the store that repeats no request; threads can share it."""
        return s3_client(self.endpoint, self.identity)

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

    def download(self, folder: Path, prefix: str = "") -> None:
        """Copy the objects below a prefix into a folder."""
        for key in self.keys(prefix):
            file = folder / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(key))


class S3Server(s3_server.S3Server):
    """A server with buckets for tests."""

    def restart(self) -> None:
        """Kill the server and start it again."""
        self.kill()
        self.start()

    def new_bucket(self, name: str = "") -> Bucket:
        """Create an empty bucket, by default with a name that no other one has."""
        bucket = Bucket(self.endpoint, name or f"test-{uuid.uuid4().hex[:12]}")
        bucket.client.create_bucket(Bucket=bucket.name)
        return bucket


class SeaweedFS(s3_server.SeaweedFS, S3Server):
    """ADMIN may do everything, READER may read and list, and WRITER may also write."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, ADMIN, {READER: ["Read", "List"], WRITER: ["Read", "List", "Write"]}
        )


class Moto(S3Server):
    """A moto server, which keeps objects in memory and lets everybody do everything."""

    def _command(self) -> Sequence[str]:
        program = str(Path(sys.executable).with_name("moto_server"))
        return [program, "-H", "127.0.0.1", "-p", str(self.port)]

    def _is_ready(self) -> bool:
        Bucket(self.endpoint, "").client.list_buckets()
        return True

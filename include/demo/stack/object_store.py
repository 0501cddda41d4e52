"""The object store of the embedded stack: an S3 server whose bucket has the lake, and what leads
there: an Airflow connection, and copies of the pipeline files that name it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from demo.jars import STORES_VARIABLE
from demo.s3_server import REGION, Identity, SeaweedFS, s3_client
from demo.stack.processes import Part, StackError
from waldelta.config.airflow_connection import variable_of
from waldelta.lake import REQUEST_LIMITS, read_store_options
from waldelta.spark.settings import S3_JARS, jars

BUCKET = "lake"
_ACCESS_KEY = "waldelta"
_ROOT_KEY = re.compile(r"^( *)root: [\"']?\$\{WALDELTA_LAKE\}.*$", re.MULTILINE)


class DemoStore:
    """An S3 server in ``folder`` on a port of its own, with one key pair that may do everything."""

    conn_id = "demo_lake"
    root = f"s3a://{BUCKET}/demo"

    def __init__(self, folder: Path, port: int, secret: str, log: Path) -> None:
        self.folder, self.port, self.log = folder, port, log
        self.pipelines = folder / "pipelines"
        self.endpoint = f"http://127.0.0.1:{port}"
        self._admin = Identity(_ACCESS_KEY, secret)

    @cached_property
    def _server(self) -> SeaweedFS:
        server = SeaweedFS(self.folder / "server", self._admin)
        server.port, server.log = self.port, self.log
        return server

    @property
    def connection(self) -> dict[str, Any]:
        """The fields of the Airflow connection ``conn_id``; they contain the secret key."""
        return {
            "conn_type": "aws",
            # The endpoint is in the extra; an aws connection has no host.
            "host": None,
            "login": self._admin.access_key,
            "password": self._admin.secret_key,
            "extra": json.dumps({"endpoint_url": self.endpoint, "region_name": REGION}),
        }

    @property
    def variables(self) -> dict[str, str]:
        """The connection as the variable that a job started by hand reads."""
        return {variable_of(self.conn_id): json.dumps(self.connection)}

    @property
    def spark_environment(self) -> dict[str, str]:
        """The variables by which Spark's own process opens the store."""
        found = read_store_options(self.root, self.conn_id, self.variables)
        return {name: value for name, value in found.items() if name not in REQUEST_LIMITS}

    def begin(self, environment: Mapping[str, str]) -> Part:
        """Start the server; everything is ready when is_up().

        Raises StackError where Spark's jars for S3 are missing.
        """
        if not any(jar.parent.name == S3_JARS for jar in jars()):
            raise StackError(
                f"Spark's jars for S3 are missing: run `{STORES_VARIABLE}=s3 make setup`"
            )
        return self._server.begin(environment)

    def is_up(self) -> bool:
        """Returns whether the server answers and has the bucket, which this creates."""
        if not self._server.is_up():
            return False
        client = s3_client(self.endpoint, self._admin)
        with suppress(ClientError):  # An earlier start has created it.
            client.create_bucket(Bucket=BUCKET)
        return True

    def copy_pipelines(self, pipelines: Path) -> None:
        """Copy pipeline files and their expectations; the copies name the connection.

        Raises StackError for a file whose root isn't below WALDELTA_LAKE.
        """
        shutil.rmtree(self.pipelines, ignore_errors=True)
        self.pipelines.mkdir(parents=True, mode=0o700)
        for path in sorted([*pipelines.glob("*.yml"), *pipelines.glob("*.yaml")]):
            text, count = _ROOT_KEY.subn(rf"\g<0>\n\1conn_id: {self.conn_id}", path.read_text())
            if not count:
                raise StackError(
                    f"{path} has no line `root: ${{WALDELTA_LAKE}}`, after which its copy names the"
                    " store's connection: write its root so, or move the file"
                )
            (self.pipelines / path.name).write_text(text)
        expectations, copied = pipelines.parent / "expectations", self.folder / "expectations"
        shutil.rmtree(copied, ignore_errors=True)
        if expectations.is_dir():
            shutil.copytree(expectations, copied)

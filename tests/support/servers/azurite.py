"""Azurite for tests: Microsoft's emulator of Azure's Blob Storage, which npm installs.

It serves no Data Lake endpoint, so Hadoop's ABFS reaches it as an account without a hierarchical
namespace.
"""

import base64
import hashlib
import hmac
import os
import subprocess
import urllib.error
import urllib.request
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pyarrow.fs import FileSelector

from demo.jars import CACHE
from demo.stack.processes import Part, start, stop, wait_until
from waldelta.lake.storage import open_folder

VERSION = "3.37.0"
ACCOUNT = "devstoreaccount1"
# Azurite's own; delta-rs takes another one from the environment only, which Spark's tasks lack.
PORT = 10000
# Azurite's documentation publishes it: every Azurite has this key.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_HOST = f"{ACCOUNT}.dfs.core.windows.net"
_API = "2021-08-06"


@dataclass(frozen=True)
class Container:
    """A container of Azurite's one account."""

    name: str

    def uri(self, path: str) -> str:
        """Return the URI of a blob or folder; abfs is ABFS without TLS."""
        return f"abfs://{self.name}@{_HOST}/{path}"

    @property
    def storage_options(self) -> dict[str, str]:
        """The options of delta-rs, which are environment variables, too.

        delta-rs must know that it is an emulator: Azurite ignores ``startFrom`` when it lists, and
        delta-rs would take the oldest log entries for the newest ones.
        """
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
        }

    def configure(self, runner: Any) -> None:
        """Have a session reach the container by the Blob endpoint, before its first use."""
        own = {
            "abfs.endpoint": f"127.0.0.1:{PORT}",
            "account.hns.enabled": "false",
            "fns.account.service.type": "BLOB",
            f"account.key.{_HOST}": KEY,
            f"account.key.{_HOST.replace('.dfs.', '.blob.')}": KEY,
            "always.use.https": "false",
            # Its other client needs TLS.
            "networking.library": "JDK_HTTP_URL_CONNECTION",
        }
        for name, value in own.items():
            runner.spark().conf.set(f"fs.azure.{name}", value)

    def keys(self, prefix: str) -> list[str]:
        """Return the blobs below a folder, in order, without Hadoop's marks of folders."""
        files = open_folder(self.uri(prefix), self.storage_options)
        found = files.get_file_info(FileSelector("", allow_not_found=True, recursive=True))
        return sorted(prefix + info.path for info in found if info.size)


class Azurite:
    """An Azurite in ``folder``; a context manager. A machine can have one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._part: Part | None = None

    def __enter__(self) -> Self:
        program = install() / "node_modules/azurite/dist/src/blob/main.js"
        command = ["node", str(program), "--blobPort", str(PORT), "--silent"]
        # Hadoop's ABFS speaks a newer version of the API than Azurite knows.
        command += ["--location", str(self.folder / "blobs"), "--skipApiVersionCheck"]
        log = self.folder / "server.log"
        self._part = start("Azurite", command, folder=self.folder, log=log, environment=os.environ)
        wait_until(self._is_up, "Azurite", 60, [self._part])
        return self

    def __exit__(self, *_: object) -> None:
        if self._part is not None:
            stop([self._part], grace_s=0)

    def new_bucket(self) -> Container:
        """Create an empty container with a name that no other one has."""
        container = Container(f"test-{uuid.uuid4().hex[:12]}")
        self._create(container.name)
        return container

    def _is_up(self) -> bool:
        with suppress(urllib.error.URLError, ConnectionError):
            self._create(f"ready-{uuid.uuid4().hex[:12]}")
            return True
        return False

    def _create(self, name: str) -> None:
        """Create a container (REST operation Create Container), signed by the shared key."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        signed = (
            f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{_API}\n"
            f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        )
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/{ACCOUNT}/{name}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": _API,
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
                "Content-Length": "0",
            },
        )
        urllib.request.urlopen(request, timeout=10).close()


def install() -> Path:
    """Install Azurite into the project's cache, once; raises CalledProcessError."""
    folder = CACHE / f"azurite-{VERSION}"
    if not (folder / "node_modules/azurite").exists():
        command = ["npm", "install", "--silent", "--prefix", str(folder), f"azurite@{VERSION}"]
        subprocess.run(command, check=True)
    return folder

"""Where a lake can be: a folder of this machine, HDFS, or an object store."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile
from urllib.parse import urlsplit

from waldelta.config.airflow_connection import ConnectionTypes
from waldelta.config.parse_text import refuse_if


@dataclass(frozen=True, slots=True)
class StoreType:
    """A kind of object store.

    ``schemes`` begin its URIs, the usual one last. ``connections`` open it, as do environment
    variables that begin with ``variables``. ``has_jars`` is whether Spark reaches it by jars that
    `waldelta jars` fetches.
    """

    schemes: tuple[str, ...]
    connections: ConnectionTypes
    variables: str
    has_jars: bool


# By the names of `waldelta jars --stores` and of WALDELTA_STORES.
STORES: Mapping[str, StoreType] = {
    "s3": StoreType(
        ("s3", "s3a"),
        ConnectionTypes(
            ("aws",), "aws://KEY:SECRET@/?region_name=eu-central-1", "--conn-login ACCESS_KEY_ID"
        ),
        "AWS_",
        has_jars=True,
    ),
    "azure": StoreType(
        ("abfs", "abfss"),
        ConnectionTypes(("wasb", "adls"), "wasb://ACCOUNT:KEY@", "--conn-login ACCOUNT"),
        "AZURE_",
        has_jars=True,
    ),
    "google": StoreType(
        ("gs",),
        ConnectionTypes(
            ("google_cloud_platform",),
            "google-cloud-platform://?key_path=/path/to/key.json",
            """--conn-extra '{"key_path": "PATH"}'""",
        ),
        "GOOGLE_",
        has_jars=False,
    ),
}
# The beginnings of variables by which the environment opens a store, for messages and helps.
STORE_VARIABLES = ", ".join(f"{store.variables}…" for store in STORES.values())
_FILE_URI = re.compile(r"file:///[^/~]")
# Their URIs begin with a bucket or container, perhaps of an account.
_IN_BUCKETS = frozenset(scheme for store in STORES.values() for scheme in store.schemes)
# Schemes that delta-rs, Arrow and Hadoop can all write to.
_SCHEMES = _IN_BUCKETS | {"file", "hdfs"}
_BUCKET = re.compile(r"//[^/@:]+(@[^/@:]+)?(:\d+)?(/|$)")


def store_of(uri: str) -> str | None:
    """Returns the name in STORES of the store that a URI is in; None for another place."""
    scheme = urlsplit(uri).scheme
    return next((name for name, store in STORES.items() if scheme in store.schemes), None)


def check_folder_uri(value: str) -> None:
    """Raise ValueError for a URI that names no folder.

    That is a URI of an unknown scheme or without a bucket, or a file: URI without an absolute path.
    In file://tmp/x, tmp is a host, so /x would be written. Other values pass.
    """
    scheme, _, path_text = value.partition(":")
    kind = scheme.lower()
    of_account = "@account.dfs.core.windows.net" if kind.startswith("abfs") else ""
    refuse_if(
        path_text.startswith("//") and kind not in _SCHEMES,
        f"no lake can be written to {scheme}://: write file://, or a store's scheme"
        f" ({', '.join(sorted(_SCHEMES - {'file'}))})",
    )
    refuse_if(
        kind in _IN_BUCKETS and not _BUCKET.match(path_text),
        f"it names no bucket: write {scheme}://bucket{of_account}/folder",
    )
    refuse_if(
        kind != "file" and path_text.startswith("//") and ".." in path_text.split("/"),
        "a store knows no parent folder: write the path without ..",
    )
    if kind == "file":
        _check_file_uri(value, [part for part in path_text.split("/") if part])


def _check_file_uri(value: str, parts: list[str]) -> None:
    # Parts that don't begin an absolute path: a host, the current folder, a home that only a shell
    # knows.
    path = "/" + "/".join(
        dropwhile(lambda part: part in ("localhost", ".", "..") or part.startswith("~"), parts)
    )
    normal = posixpath.normpath(path)
    refuse_if(
        normal == "/",
        "it names no folder below the file system's root: write file:// and an absolute path",
    )
    refuse_if(parts[:1] == [".."], f"nothing is above the file system's root: write file://{path}")
    refuse_if(".." in parts, f"it leads through a parent folder: write file://{normal}")
    refuse_if(
        not _FILE_URI.match(value),
        "a file URI is file:// and an absolute path, so that three slashes begin it: write"
        f" file://{path}, if that is the folder",
    )

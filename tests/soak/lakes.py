"""The lake of a soak: in a folder, or in a bucket behind a proxy that disturbs requests."""

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable

from tests.support.servers.s3_server import Bucket, SeaweedFS
from tests.support.servers.store_proxy import Hold, StoreProxy
from waldelta.lake import bookkeeping_uri, local_path
from waldelta.lake.storage import CHANGES

DELAY_S = 0.03
FAIL_SHARE = 0.05
# How long a request can arrive after the client that sent it was killed.
_LATEST_S = 3.0


@dataclass(frozen=True)
class SoakLake:
    """A lake: the pipelines' ``environment`` leads to it by the proxy, ``options`` past that."""

    root: str
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    def table(self, uri: str) -> DeltaTable:
        """A table of the lake as delta-rs reads it."""
        folder = local_path(uri)
        return DeltaTable(
            uri if folder is None else str(folder), storage_options=dict(self.options) or None
        )

    def landed_twice(self) -> list[str]:
        """What is wrong with the change log; nothing when each commit stands there once."""
        log = self.table(bookkeeping_uri(self.root, CHANGES))
        commits = log.to_pyarrow_dataset().to_table(
            columns=["end_lsn", "batch"], filter=pc.field("kind") == "C"
        )
        twice = len(commits) - pc.count_distinct(commits["end_lsn"]).as_py()
        return [f"change log: {twice} transactions landed twice"] if twice else []


class Store:
    """An S3 server and its proxy; ``faults`` counts those that came so far."""

    def __init__(self, server: SeaweedFS, proxy: StoreProxy, bucket: Bucket) -> None:
        self.server, self.proxy, self.bucket = server, proxy, bucket
        self.faults: Counter[str] = Counter()

    def lake(self, name: str) -> SoakLake:
        """An empty lake of that name."""
        by_proxy = self.bucket.at(self.proxy.endpoint)
        return SoakLake(
            self.bucket.uri(name), by_proxy.storage_options, self.bucket.storage_options
        )

    @contextmanager
    def disturbed(self, chosen: random.Random, longest_s: float) -> Iterator[None]:
        """A block, at the end of which a client is killed, and in which a fault of the store comes.

        Either one PUT arrives only after the block; or the server is killed and started again; or
        nothing but what the proxy always does.
        """
        restart = threading.Timer(chosen.uniform(0, longest_s), self.server.restart)
        match chosen.choice(("late PUT", "restart", "none")):
            case "late PUT":
                with self.late_put(chosen):
                    yield
            case "restart":
                restart.start()
                yield
                restart.join()
                self.faults["restart"] += 1
            case _:
                yield

    @contextmanager
    def late_put(self, chosen: random.Random, path: str = "") -> Iterator[Hold]:
        """A block whose first PUT of a matching path arrives up to some seconds after the block."""
        with ExitStack() as late:
            held = late.enter_context(self.proxy.hold(f" PUT .*{path}", 1))
            yield held
            self.faults["late PUT"] += held.has_held
            end = late.pop_all().close
        threading.Timer(chosen.uniform(0, _LATEST_S), end).start()


@contextmanager
def new_store(seed: int, fail_share: float = FAIL_SHARE) -> Iterator[Store]:
    """A running store, whose proxy delays each request and refuses a share of them."""
    with (
        tempfile.TemporaryDirectory(prefix="waldelta-soak-store-") as folder,
        SeaweedFS(Path(folder)) as server,
        StoreProxy(server.port, seed) as proxy,
    ):
        proxy.delay_s, proxy.fail_share = DELAY_S, fail_share
        yield Store(server, proxy, server.new_bucket())

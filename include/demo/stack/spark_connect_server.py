"""The stack's Spark Connect server: a process of its own, with the stack's Java and token."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from demo.java import java_home
from demo.stack.processes import Part, StackError, start
from waldelta.errors import ConfigError
from waldelta.lake import is_store_variable
from waldelta.spark.connect_server import HOST, TOKEN_VARIABLE, ConnectServer, port_on_ipv6


@dataclass(frozen=True, repr=False)
class SparkConnectServer(ConnectServer):
    """A server that the stack starts; without a ``store``, the caller's variables open the lake's
    object store.
    """

    token: str = field(kw_only=True)
    log: Path = field(kw_only=True)

    @property
    def remote(self) -> str:
        """SPARK_REMOTE for a client; it contains the token."""
        return f"sc://{HOST}:{self.port}/;token={self.token}"

    def start(self, environment: Mapping[str, str]) -> Part:
        """Start the server; it takes some seconds until ``is_listening``."""
        command, own = self.prepare(str(Path(self.python).with_name("spark-submit")))
        own |= {"JAVA_HOME": str(java_home()), TOKEN_VARIABLE: self.token}
        try:
            with port_on_ipv6(self.port) as port:
                return start(
                    "Spark Connect server",
                    command,
                    folder=self.folder,
                    log=self.log,
                    environment={**self._opening(environment), **own},
                    held=port,
                )
        except ConfigError as err:
            raise StackError(str(err)) from err

    def _opening(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment with the store's variables in place of others of their kind."""
        if not self.store:
            return dict(environment)
        return {k: v for k, v in environment.items() if not is_store_variable(k)} | dict(self.store)

    def is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

"""The state of a running stack in its folder, for the next command: ports and process ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from demo.stack.airflow_processes import write_private
from demo.stack.processes import Part


@dataclass(frozen=True)
class StackState:
    """One start of a stack; ``complete`` once everything was found healthy."""

    postgres_port: int
    spark_port: int
    airflow_port: int
    store_port: int = 0
    parts: tuple[Part, ...] = ()
    complete: bool = False

    def write(self, path: Path) -> None:
        parts = [
            {
                "name": p.name,
                "pid": p.pid,
                "created": p.created,
                "log": str(p.log),
                "needed": p.needed,
            }
            for p in self.parts
        ]
        write_private(path, json.dumps(self.__dict__ | {"parts": parts}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path, own: Sequence[Part] = ()) -> Self | None:
        """Return the state in this file, None when there is none.

        Parts in ``own`` keep their handle, so that it can reap them.
        """
        try:
            document = json.loads(path.read_text())
            known = {part.pid: part for part in own}
            parts = tuple(
                known.get(p["pid"])
                or Part(p["name"], p["pid"], p["created"], Path(p["log"]), needed=p["needed"])
                for p in document.pop("parts")
            )
            return cls(**document, parts=parts)
        except (OSError, ValueError, KeyError, TypeError):
            return None

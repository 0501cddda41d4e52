"""The publications and pgoutput options that a batch was read with, stored in its Delta commit.

With them, verification re-reads the slot in the same way. The pipeline file may have changed by the
time that a run finds a slot behind what has landed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from waldelta.config import Publication, Source


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The options of a source that decide what a slot returns."""

    publication_names: tuple[str, ...]
    messages: bool
    origin: str

    @classmethod
    def of(cls, source: Source) -> Self:
        """Create it from the pipeline file."""
        return cls(tuple(source.publication_names), source.options.messages, source.options.origin)

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> Self | None:
        """Create it from a commit's metadata; None when an earlier version wrote the commit without
        it.
        """
        if "publication_names" not in info:
            return None
        return cls(tuple(info["publication_names"]), info["messages"], info["origin"])

    def as_commit_info(self) -> dict[str, Any]:
        """Return it as fields of a commit's metadata."""
        return {
            "publication_names": list(self.publication_names),
            "messages": self.messages,
            "origin": self.origin,
        }

    def put_to(self, source: Source) -> Source:
        """Return the source with these options."""
        publications = tuple(
            Publication(name=name, manage=False) for name in self.publication_names
        )
        options = source.options.model_copy(
            update={"messages": self.messages, "origin": self.origin}
        )
        return source.model_copy(update={"publications": publications, "options": options})

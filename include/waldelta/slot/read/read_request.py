"""What a batch was read by, told in its commit, so that what the slot holds of it is
compared by the same.

Publications and options of the pipeline file may be others by the time that a run finds a slot
behind what has landed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from waldelta.config import Publication, Source


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What of a source decides on what a slot gives."""

    publication_names: tuple[str, ...]
    messages: bool
    origin: str

    @classmethod
    def of(cls, source: Source) -> Self:
        """As the pipeline file has it."""
        return cls(tuple(source.publication_names), source.options.messages, source.options.origin)

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> Self | None:
        """From a commit's metadata; None where it was written by a version that didn't tell."""
        if "publication_names" not in info:
            return None
        return cls(tuple(info["publication_names"]), info["messages"], info["origin"])

    def as_commit_info(self) -> dict[str, Any]:
        """For a commit's metadata."""
        return {
            "publication_names": list(self.publication_names),
            "messages": self.messages,
            "origin": self.origin,
        }

    def put_to(self, source: Source) -> Source:
        """The source, asked likewise."""
        publications = tuple(
            Publication(name=name, manage=False) for name in self.publication_names
        )
        options = source.options.model_copy(
            update={"messages": self.messages, "origin": self.origin}
        )
        return source.model_copy(update={"publications": publications, "options": options})

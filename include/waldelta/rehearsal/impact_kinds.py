"""The kinds of effects that a rehearsal may find."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# What may be found, in the order of a report; each is a word of --fail-on, or none.
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "error": "PostgreSQL refuses the statement",
        "app-error": "statements of the application fail from now on",
        "data-loss": "targets lose values, or differ from the source and no run notices",
        "stop": "the pipeline stops until an operator acts",
        "copy": "rows are copied again",
        "wait": "a decision waits for a person",
        "lock": "writers wait while rows are read or written",
        "readers": "readers of the lake see other columns",
        "note": "worth knowing",
    }
)
# The kinds that end the command with exit code 3 unless --fail-on says otherwise.
FAILING: Final = ("error", "app-error", "data-loss", "stop")

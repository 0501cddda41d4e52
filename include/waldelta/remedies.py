"""The classes of errors by name, and the remedy of each, for pipeline files and notifiers."""

from __future__ import annotations

from waldelta import errors
from waldelta.error_catalog import ERROR_CATALOG
from waldelta.errors import WaldeltaError

# Every failure of a task, also one without a class: a job that was killed, a time limit.
ANY_ERROR = "any"
ERRORS: dict[str, type[WaldeltaError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, WaldeltaError)
}


def is_kind(name: str, of: str) -> bool:
    """Whether errors of one class are of another, given both names; ``any`` is what all are of.

    >>> is_kind("SlotGap", "SlotError"), is_kind("SlotGap", "LakeError"), is_kind("Killed", "any")
    (True, False, True)
    """
    return of == ANY_ERROR or (
        name in ERRORS and of in ERRORS and issubclass(ERRORS[name], ERRORS[of])
    )


# docs/reference/errors.md shows the same texts.
REMEDIES: dict[str, str] = {name: entry.remedy for name, entry in ERROR_CATALOG.items()}

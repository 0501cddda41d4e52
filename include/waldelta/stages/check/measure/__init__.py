"""Measures columns, profiles, duplicate keys and references of a target."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys, find_duplicate_keys
    from waldelta.stages.check.measure.profile import Measured
    from waldelta.stages.check.measure.references import Reference

__all__ = [
    "DuplicateKeys",
    "Measured",
    "Reference",
    "find_duplicate_keys",
]
__getattr__ = lazy_exports(
    __name__,
    duplicate_keys="DuplicateKeys find_duplicate_keys",
    profile="Measured",
    references="Reference",
)

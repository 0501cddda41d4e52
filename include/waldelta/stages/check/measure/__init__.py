"""Measures columns, profiles, duplicate keys and references of a target."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys, find_duplicate_keys
    from waldelta.stages.check.measure.profile import Measured
    from waldelta.stages.check.measure.references import Reference
    from waldelta.stages.check.measure.row_conditions import RowCondition, row_condition

__all__ = [
    "DuplicateKeys",
    "Measured",
    "Reference",
    "RowCondition",
    "find_duplicate_keys",
    "row_condition",
]
__getattr__ = lazy_exports(
    __name__,
    duplicate_keys="DuplicateKeys find_duplicate_keys",
    profile="Measured",
    references="Reference",
    row_conditions="RowCondition row_condition",
)

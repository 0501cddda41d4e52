"""Constraints of the source that become expectations."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.constraints.check_constraints import (
        CheckConstraint,
        read_check_constraints,
    )
    from waldelta.stages.check.constraints.declared_types import DeclaredType, read_declared_types
    from waldelta.stages.check.constraints.foreign_keys import ForeignKey, read_foreign_keys

__all__ = [
    "CheckConstraint",
    "DeclaredType",
    "ForeignKey",
    "read_check_constraints",
    "read_declared_types",
    "read_foreign_keys",
]
__getattr__ = lazy_exports(
    __name__,
    check_constraints="CheckConstraint read_check_constraints",
    declared_types="DeclaredType read_declared_types",
    foreign_keys="ForeignKey read_foreign_keys",
)

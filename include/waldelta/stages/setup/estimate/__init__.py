"""Estimate: how much the initial copy of a pipeline's tables will read, write and cost."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.estimate.estimate import CopyEstimate, estimate_copies

__all__ = ["CopyEstimate", "estimate_copies"]
__getattr__ = lazy_exports(__name__, estimate="CopyEstimate estimate_copies")

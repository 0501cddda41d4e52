"""Which targets a pipeline has, each target's source, and its table lifecycle."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.pipeline.targets.lifecycle import RequiredAction, TableLifecycle
    from waldelta.pipeline.targets.target_sources import ReplicatedTarget, TargetSource
    from waldelta.pipeline.targets.watermarks import Watermarks

__all__ = ["ReplicatedTarget", "RequiredAction", "TableLifecycle", "TargetSource", "Watermarks"]
__getattr__ = lazy_exports(
    __name__,
    lifecycle="RequiredAction TableLifecycle",
    target_sources="ReplicatedTarget TargetSource",
    watermarks="Watermarks",
)

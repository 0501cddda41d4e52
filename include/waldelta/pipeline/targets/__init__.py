"""Which targets a pipeline has, each target's source, and its table lifecycle."""

from waldelta.pipeline.targets.lifecycle import RequiredAction, TableLifecycle
from waldelta.pipeline.targets.target_sources import ReplicatedTarget, TargetSource
from waldelta.pipeline.targets.watermarks import Watermarks

__all__ = ["ReplicatedTarget", "RequiredAction", "TableLifecycle", "TargetSource", "Watermarks"]

"""The context of one run: its job, locks, connections, result and source load."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.pipeline.advisory_locks import AdvisoryLock, slot_lock, target_lock
    from waldelta.pipeline.job import Job
    from waldelta.pipeline.run_result import RunResult, StageResult
    from waldelta.pipeline.slot_identity import SlotIdentity
    from waldelta.pipeline.source_connections import SourceConnections

__all__ = [
    "AdvisoryLock",
    "Job",
    "RunResult",
    "SlotIdentity",
    "SourceConnections",
    "StageResult",
    "slot_lock",
    "target_lock",
]
__getattr__ = lazy_exports(
    __name__,
    advisory_locks="AdvisoryLock slot_lock target_lock",
    job="Job",
    run_result="RunResult StageResult",
    slot_identity="SlotIdentity",
    source_connections="SourceConnections",
)

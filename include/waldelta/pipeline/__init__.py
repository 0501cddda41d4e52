"""The context of one run: its job, locks, connections, result and source load."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.pipeline.advisory_locks import (
        AdvisoryLock,
        slot_lock,
        target_lock,
        waiting_for_locks,
    )
    from waldelta.pipeline.job import Job, SlotIdentity, ledger_of
    from waldelta.pipeline.run_result import RunResult, StageResult, TableResult
    from waldelta.pipeline.source import SourceConnections, SourceLoad
    from waldelta.pipeline.task_errors import (
        describe_error,
        is_conflict,
        named_error,
        of_table,
        unexpected_error,
    )

__all__ = [
    "AdvisoryLock",
    "Job",
    "RunResult",
    "SlotIdentity",
    "SourceConnections",
    "SourceLoad",
    "StageResult",
    "TableResult",
    "describe_error",
    "is_conflict",
    "ledger_of",
    "named_error",
    "of_table",
    "slot_lock",
    "target_lock",
    "unexpected_error",
    "waiting_for_locks",
]
__getattr__ = lazy_exports(
    __name__,
    advisory_locks="AdvisoryLock slot_lock target_lock waiting_for_locks",
    job="Job SlotIdentity ledger_of",
    run_result="RunResult StageResult TableResult",
    source="SourceConnections SourceLoad",
    task_errors="describe_error is_conflict named_error of_table unexpected_error",
)

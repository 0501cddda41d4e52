"""Stage apply: merges landed changes into targets, in apply batches."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.apply.concurrent import applying
    from waldelta.stages.apply.logical_messages import write_messages
    from waldelta.stages.apply.outcome import Applied, add_external_commits, add_to_result

__all__ = ["Applied", "add_external_commits", "add_to_result", "applying", "write_messages"]
__getattr__ = lazy_exports(
    __name__,
    concurrent="applying",
    logical_messages="write_messages",
    outcome="Applied add_external_commits add_to_result",
)

"""Merges staged net changes into a target, as one commit."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.changes.merge.commits import read_commit, take_over_target
    from waldelta.changes.merge.merge import merge_staged
    from waldelta.changes.merge.statements import CommitTag

__all__ = ["CommitTag", "merge_staged", "read_commit", "take_over_target"]
__getattr__ = lazy_exports(
    __name__, commits="read_commit take_over_target", merge="merge_staged", statements="CommitTag"
)

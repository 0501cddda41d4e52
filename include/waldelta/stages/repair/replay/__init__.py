"""Replay: derives a target's states again from the change log."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.repair.replay.interval import is_replay, read_span

__all__ = ["is_replay", "read_span"]
__getattr__ = lazy_exports(__name__, interval="is_replay read_span")

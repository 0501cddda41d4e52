"""Preflight: finds what would fail or mislead later, before anything is changed."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.preflight.lake import check_store
    from waldelta.stages.setup.preflight.source import judge
    from waldelta.stages.setup.preflight.target_filters import Translate

__all__ = ["Translate", "check_store", "judge"]
__getattr__ = lazy_exports(__name__, lake="check_store", source="judge", target_filters="Translate")

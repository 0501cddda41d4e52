"""Preflight: finds what would fail or mislead later, before anything is changed."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.preflight.source import judge
    from waldelta.stages.setup.preflight.store_probe import probe_store

__all__ = ["judge", "probe_store"]
__getattr__ = lazy_exports(__name__, source="judge", store_probe="probe_store")

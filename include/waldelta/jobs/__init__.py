"""Jobs: one file per job, with its stages in order."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.jobs.pipeline import Pipeline

__all__ = ["Pipeline"]
__getattr__ = lazy_exports(__name__, pipeline="Pipeline")

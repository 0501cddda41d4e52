"""Stage check: validates targets by expectations, and decides by gates."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check._check_run import RunOutcome

__all__ = ["RunOutcome"]
__getattr__ = lazy_exports(__name__, _check_run="RunOutcome")

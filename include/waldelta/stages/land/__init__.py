"""Stage land: appends the slot's messages to the change log."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.land.idle_check import check_idle
    from waldelta.stages.land.land_stage import land_to_now
    from waldelta.stages.land.land_until import land_backlog, land_through

__all__ = ["check_idle", "land_backlog", "land_through", "land_to_now"]
__getattr__ = lazy_exports(
    __name__,
    idle_check="check_idle",
    land_stage="land_to_now",
    land_until="land_backlog land_through",
)

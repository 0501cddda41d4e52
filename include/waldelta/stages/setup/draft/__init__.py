"""Draft: proposes a pipeline file, and the grants for it, from the tables that a database has."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.draft.draft import Draft
    from waldelta.stages.setup.draft.inventory import (
        ExcludedTable,
        FoundTable,
        Inventory,
        read_inventory,
    )

__all__ = ["Draft", "ExcludedTable", "FoundTable", "Inventory", "read_inventory"]
__getattr__ = lazy_exports(
    __name__, draft="Draft", inventory="FoundTable Inventory ExcludedTable read_inventory"
)

"""The replication slot: reading, acknowledging and recovering it, following a promotion; its
health.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.slot.slot import SlotState, read_slot
    from waldelta.slot.standby import remaining_on_primary, slot_position

__all__ = ["SlotState", "read_slot", "remaining_on_primary", "slot_position"]
__getattr__ = lazy_exports(
    __name__, slot="SlotState read_slot", standby="remaining_on_primary slot_position"
)

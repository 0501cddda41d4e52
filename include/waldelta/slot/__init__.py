"""The replication slot: read, acknowledge, recover, follow; its health and failover."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.slot.slot import SlotState, read_slot
    from waldelta.slot.standby import remaining_on_primary, slot_position

__all__ = ["SlotState", "read_slot", "remaining_on_primary", "slot_position"]
__getattr__ = lazy_exports(
    __name__, slot="SlotState read_slot", standby="remaining_on_primary slot_position"
)

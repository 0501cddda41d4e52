"""The replication slot: reading, acknowledging and recovering it, following a promotion; its
health.
"""

from waldelta.slot.slot import SlotState, read_slot
from waldelta.slot.standby import remaining_on_primary, slot_position

__all__ = ["SlotState", "read_slot", "remaining_on_primary", "slot_position"]

"""The replication slot: reading, acknowledging and recovering it, following a promotion; its
health.
"""

from waldelta.slot.gaps import open_gaps
from waldelta.slot.health import slot_warnings
from waldelta.slot.recovery import recover
from waldelta.slot.slot import PLUGIN, SlotState, check_ours, read_slot
from waldelta.slot.standby import (
    check_system,
    remaining_on_primary,
    slot_position,
    standby_warnings,
)

__all__ = [
    "PLUGIN",
    "SlotState",
    "check_ours",
    "check_system",
    "open_gaps",
    "read_slot",
    "recover",
    "remaining_on_primary",
    "slot_position",
    "slot_warnings",
    "standby_warnings",
]

"""A slot as the server shows it, with nothing remarkable; tests replace what they are about."""

from waldelta.lsn import Lsn
from waldelta.slot import SlotState

SLOT = SlotState(
    name="s", plugin="pgoutput", slot_type="logical", database="d", in_this_database=True,
    temporary=False, active=False, active_pid=None, active_by=None, confirmed_flush_lsn=Lsn(1),
    restart_lsn=Lsn(1), wal_status="reserved", safe_wal_size=None, two_phase=False,
    invalidation_reason=None, inactive_since=None, retained_bytes=0, system_identifier="1",
    timeline=1,
)  # fmt: skip

"""A slot as the server shows it, with nothing remarkable; tests replace what they are about."""

from waldelta.lsn import Lsn
from waldelta.slot.slot import SlotState

SLOT = SlotState(
    name="s", plugin="pgoutput", slot_type="logical", database="d", in_this_database=True,
    temporary=False, active=False, active_pid=None, active_by=None, confirmed_flush_lsn=Lsn(1),
    restart_lsn=Lsn(1), wal_status="reserved", safe_wal_size=None, two_phase=False,
    invalidation_reason=None, inactive_since=None, retained_bytes=0, system_identifier="1",
    timeline=1,
)  # fmt: skip


def lose(database) -> None:
    """Let the server take away the WAL that its slots hold back."""
    database.execute("alter system set max_slot_wal_keep_size = '1MB'")
    try:
        database.execute("select pg_reload_conf()")
        for _ in range(3):
            database.execute("select pg_logical_emit_message(false, 'x', repeat('x', 8000000))")
            database.execute("select pg_switch_wal()")
        database.execute("checkpoint")
    finally:
        database.execute("alter system reset max_slot_wal_keep_size")
        database.execute("select pg_reload_conf()")

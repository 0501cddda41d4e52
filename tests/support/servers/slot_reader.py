"""A real program that reads a slot: pg_recvlogical."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reading_slot(
    database, slot: str, publication: str, application_name: str = "pg_recvlogical"
) -> Iterator[subprocess.Popen]:
    """A reader that holds the slot, and moves it nowhere while it is young."""
    conninfo = f"{database.conninfo} application_name='{application_name}'"
    command = [str(database.server.bin / "pg_recvlogical"), "-d", conninfo, "-S", slot]
    command += f"--start -f - -n -o proto_version=1 -o publication_names={publication}".split()
    reader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    is_active = "select 1 from pg_replication_slots where slot_name = %s and active"
    try:
        while not database.execute(is_active, (slot,)):
            assert reader.poll() is None
        yield reader
    finally:
        reader.kill()
        reader.wait(timeout=30)

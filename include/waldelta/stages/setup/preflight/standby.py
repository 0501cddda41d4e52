"""Preflight of the standby in source.read_from: whether it can have the slot, and what would
invalidate the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from waldelta.errors import (
    AuthenticationFailed,
    NotPrimary,
    NotStandby,
    PrivilegeMissing,
    SourceChanged,
    SourceUnreachable,
)
from waldelta.findings import Finding, problem, problem_if, warning, warning_if
from waldelta.pipeline import Job
from waldelta.postgres import Connection
from waldelta.slot import remaining_on_primary, slot_position
from waldelta.stages.setup.facts.source_facts import Facts, ServerFacts

MIN_STANDBY_VERSION = 160000
# Connections that are opened to see whether all lead to one server: an address of several servers
# returns them in turn, or at random.
TRIALS = 3


def judge_standby(
    primary: Connection, connection: Connection, job: Job, facts: Facts
) -> Iterator[Finding]:
    """Yields findings about source.read_from, whose server ``connection`` leads to.

    Yields nothing without it.
    """
    if job.pipeline.source.read_from is None or facts.server.in_recovery:
        return
    standby = facts.slot_server
    if standby.version < MIN_STANDBY_VERSION:
        yield problem(
            "source.read_from needs PostgreSQL 16 or later, this is"
            f" {standby.settings.get('server_version')}: leave it out, or upgrade the servers"
        )
        return
    try:
        slot_position(connection, job, primary)
    except (
        NotPrimary,
        NotStandby,
        SourceChanged,
        SourceUnreachable,
        AuthenticationFailed,
        PrivilegeMissing,
    ) as err:
        yield problem(str(err))
        return
    yield from judge_servers(_servers_behind(job))
    yield from judge_settings(standby)
    yield from warning_if(
        facts.slot is None and not facts.server.can_log_snapshots,
        f"role {facts.server.role!r} may not execute pg_log_standby_snapshot() on the primary,"
        " so setup can create the standby's slot only when the primary happens to log its"
        " running transactions, and an idle primary never does: grant execute on function"
        f" pg_log_standby_snapshot() to {facts.server.role} (docs/reference/privileges.md)",
    )
    yield from map(warning, remaining_on_primary(primary, connection, job.pipeline.source.slot))


def judge_servers(answers: set[tuple[str, str]]) -> Iterable[Finding]:
    """Returns a problem if several connections to source.read_from reached different servers; pure.

    Each answer is an address and the server's start time.
    """
    servers = ", ".join(f"{address} (started {started})" for address, started in sorted(answers))
    return problem_if(
        len(answers) > 1,
        f"source.read_from leads to more than one server ({servers}), and only one of them has the"
        " slot: point it at that server, not at a load balancer or a name of several standbys"
        " (docs/how-to/read-from-a-standby.md)",
    )


def _servers_behind(job: Job) -> set[tuple[str, str]]:
    servers = set()
    for _ in range(TRIALS):
        with job.source.connect_slot("check") as connection:
            ((address, started),) = connection.execute(_SERVER).fetchall()
            servers.add((str(address), str(started)))
    return servers


def judge_settings(standby: ServerFacts) -> Iterator[Finding]:
    """Yields findings about the standby's own settings; pure."""
    settings = standby.settings
    yield from problem_if(
        standby.behind_pooler or settings.get("search_path") != "pg_catalog",
        "a connection pooler answers instead of source.read_from's server: point the connection"
        " at PostgreSQL itself",
    )
    yield from problem_if(
        settings["wal_level"] != "logical",
        f"wal_level of source.read_from's server is {settings['wal_level']!r}, but decoding"
        " needs logical there too: alter system set wal_level = 'logical', then restart that"
        " standby",
    )
    lacking = [
        *(["hot_standby_feedback is off"] if settings.get("hot_standby_feedback") != "on" else []),
        *(["primary_slot_name is empty"] if not settings.get("primary_slot_name") else []),
    ]
    yield from warning_if(
        lacking,
        f"on the standby of source.read_from {' and '.join(lacking)}: vacuum on the primary"
        " may remove catalog rows that the slot needs, then the slot is lost and all tables"
        " need a resync; set hot_standby_feedback = on and a primary_slot_name with a"
        " physical slot on the primary, and reload (docs/how-to/read-from-a-standby.md)",
    )


_SERVER = """
select coalesce(host(inet_server_addr()), 'local') || ':' || coalesce(inet_server_port(), 0),
       pg_postmaster_start_time()::text
"""

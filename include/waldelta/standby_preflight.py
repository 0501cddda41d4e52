"""Preflight of a standby that is to have the slot (source.read_from): whether it can, and what would take the slot away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from waldelta.errors import NotPrimary, NotStandby, SourceChanged, SourceUnreachable
from waldelta.finding import Finding, problem, warning
from waldelta.job import Job
from waldelta.source_facts import Facts, ServerFacts
from waldelta.standby import left_on_primary, slot_position

Connection = psycopg.Connection[Any]

MIN_VERSION = 160000


def judge_standby(primary: Connection, connection: Connection, job: Job, facts: Facts) -> Iterator[Finding]:
    """What is to be told of source.read_from, whose server ``connection`` leads to; nothing without it."""
    if job.pipeline.source.read_from is None or facts.server.in_recovery:
        return
    standby = facts.slot_server
    if standby.version < MIN_VERSION:
        yield problem(
            f"source.read_from needs PostgreSQL 16 or later, this is {standby.settings.get('server_version')}: leave it out, or "
            "upgrade the servers"
        )
        return
    try:
        slot_position(connection, job, primary)
    except (NotPrimary, NotStandby, SourceChanged, SourceUnreachable) as err:
        yield problem(str(err))
        return
    yield from judge_settings(standby)
    if facts.slot is None and not facts.server.can_log_snapshots:
        yield warning(
            f"role {facts.server.role!r} may not execute pg_log_standby_snapshot() on the primary, so the standby's slot is made "
            "when the primary happens to write down which transactions run, and not while it is idle: grant execute on "
            f"function pg_log_standby_snapshot() to {facts.server.role} (docs/privileges.md)"
        )
    yield from (warning(text) for text in left_on_primary(primary, connection, job.pipeline.source.slot))


def judge_settings(standby: ServerFacts) -> Iterator[Finding]:
    """What the standby's own settings say; pure."""
    if standby.behind_pooler or standby.settings.get("search_path") != "pg_catalog":
        yield problem(
            "a connection pooler answers instead of source.read_from's server: point the connection at PostgreSQL itself"
        )
    if (level := standby.settings["wal_level"]) != "logical":
        yield problem(
            f"wal_level of source.read_from's server is {level!r}, which decoding asks for there too: alter system set "
            "wal_level = 'logical', then restart that standby"
        )
    lacking = [
        *(["hot_standby_feedback is off"] if standby.settings.get("hot_standby_feedback") != "on" else []),
        *(["primary_slot_name is empty"] if not standby.settings.get("primary_slot_name") else []),
    ]
    if lacking:
        yield warning(
            f"on the standby of source.read_from {' and '.join(lacking)}: vacuum on the primary may remove rows of its catalogs "
            "that the slot needs, which makes the slot lost, and asks for a resync of all tables; set hot_standby_feedback = on "
            "and a primary_slot_name with a physical slot on the primary, and reload (docs/standby.md)"
        )

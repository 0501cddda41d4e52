"""Preflight: finds everything that would later break the source or the pipeline, before anything is
changed.

The judges are pure: they take the facts of ``source_facts`` and the wanted publications, and return
findings. Only ``judge_standby`` queries the standby. A problem refuses setup; a warning is a matter
of policy and has figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from waldelta.config import PipelineFile, Publication
from waldelta.errors import (
    AuthenticationFailed,
    ConfigError,
    NotPrimary,
    NotStandby,
    PrivilegeMissing,
    SlotForeign,
    SourceChanged,
    SourceUnreachable,
)
from waldelta.findings import (
    Finding,
    Grant,
    RoleAttribute,
    lacking,
    owning,
    problem,
    problem_if,
    sql_name,
    warning,
    warning_if,
)
from waldelta.pipeline import Job
from waldelta.pipeline.report_folder import judge_docs
from waldelta.postgres import Connection
from waldelta.quantities import counted, first_of, size
from waldelta.row_filter import parse_row_filter
from waldelta.slot.slot import SlotState, check_ours, lost_slot
from waldelta.slot.standby import remaining_on_primary, slot_position
from waldelta.stages.setup.facts.publications import (
    Mark,
    PublicationState,
    plan_publications,
)
from waldelta.stages.setup.facts.source_facts import (
    TIMEOUTS,
    Facts,
    ServerFacts,
    members,
)
from waldelta.stages.setup.preflight._tables import judge_binary, judge_functions, judge_table
from waldelta.stages.setup.preflight.lake import judge_store

MIN_VERSION = 150000
MIN_STANDBY_VERSION = 160000
# Connections that are opened to see whether all lead to one server: an address of several servers
# returns them in turn, or at random.
TRIALS = 3
# Encodings in which every byte that PostgreSQL stores has a character in UTF-8.
WITHIN_UTF8 = (
    "UTF8",
    "LATIN1",
    "LATIN2",
    "LATIN4",
    "LATIN5",
    "LATIN6",
    "LATIN7",
    "LATIN8",
    "LATIN9",
    "LATIN10",
    "ISO_8859_5",
    "KOI8R",
    "KOI8U",
    "WIN866",
    "WIN1256",
)

_NO_CHANGES = "after the copy its tables get no changes, as with a subscription"


def judge(
    pipeline: PipelineFile, facts: Facts, in_force: Mapping[str, PublicationState]
) -> list[Finding]:
    """Returns all findings.

    ``in_force`` are the publications in force after setup, managed or not, as the server prints
    them.
    """
    findings = [
        *_server(pipeline, facts.server, facts.slot is not None),
        *_free_slots(pipeline, facts.slot_server, facts.slot is not None),
        *_server_warnings(pipeline, facts),
        *_slot(pipeline, facts.slot),
        *judge_docs(pipeline),
        *judge_store(pipeline.target),
    ]
    for entry in pipeline.source.publications:
        state = in_force.get(entry.name)
        findings += _ownership(pipeline, entry, facts)
        if state is not None:
            findings += _scope(entry, state, facts)
            findings += _patterns(entry, facts)
            findings += judge_members(pipeline, state, facts)
    return list(dict.fromkeys(findings))


def judge_members(
    pipeline: PipelineFile, state: PublicationState, facts: Facts
) -> Iterator[Finding]:
    """Yields findings about each table that a publication names or covers."""
    for table in members(state, facts):
        where = f"publication {state.name!r}, table {table.id}"
        if (there := facts.tables.get(table.id)) is None:
            yield problem(f"{where}: it does not exist: check schema and spelling")
            continue
        yield from judge_table(where, state, table, there, facts)
        yield from judge_functions(where, there, facts.server)
        if pipeline.source.options.binary:
            yield from judge_binary(where, table, there.relation)


def judge_filters(entry: Publication) -> list[Finding]:
    """Returns a finding for each filter that can't be parsed."""
    findings = []
    for table in entry.tables:
        if table.where is not None:
            try:
                parse_row_filter(table.where)
            except ConfigError as err:
                findings.append(problem(f"publication {entry.name!r}, table {table.name}: {err}"))
    return findings


def judge_privileges(state: PublicationState, facts: Facts) -> Iterator[Finding]:
    """Yields what the role lacks to create or alter a publication: grants, ownership, superuser."""
    server, current = facts.server, facts.actual.get(state.name)
    if server.superuser or not plan_publications([state], facts.actual):
        return
    if current is None and not server.can_create:
        yield owning(
            f"publication {state.name!r} must be created",
            Grant("create on database", sql_name(server.database)),
        )
    if current is not None and not current.owned:
        yield owning(f"publication {state.name!r} belongs to {current.owner}")
    new_schemas = set(state.schemas) - set(current.schemas if current else ())
    if state.all_tables or new_schemas:
        yield owning(
            f"publication {state.name!r}: only a superuser may publish all tables or whole schemas"
        )
    new = set(state.tables) - set(current.tables if current else ())
    foreign: dict[str, list[str]] = {}
    for table_id in sorted(facts.tables.keys() & {table.id for table in new}):
        relation = facts.tables[table_id].relation
        if not relation.owned:
            foreign.setdefault(relation.owner, []).append(str(table_id))
    # A membership in the owner's role isn't advised: the role that reads would own the tables.
    for owner, tables in foreign.items():
        yield owning(
            f"publication {state.name!r}: the role doesn't own {', '.join(tables)} ({owner} does)"
        )


# --- the server
# ------------------------------------------------------------------------------------------------


def _server(pipeline: PipelineFile, server: ServerFacts, slot_exists: bool) -> Iterator[Finding]:
    settings, version = server.settings, server.settings.get("server_version")
    yield from problem_if(
        server.version < MIN_VERSION,
        f"PostgreSQL 15 or later is needed, this is {version}: upgrade it",
    )
    yield from problem_if(
        server.in_recovery,
        "the server is a standby: point the connection at the primary, copies need its"
        " snapshots, or promote it",
    )
    yield from problem_if(
        settings["wal_level"] != "logical",
        f"wal_level is {settings['wal_level']!r}: alter system set wal_level = 'logical',"
        " then restart the server",
    )
    yield from problem_if(
        settings["server_encoding"] == "SQL_ASCII",
        f"database {server.database} is in SQL_ASCII, which stores bytes without saying what"
        " text they are, so values can't be read reliably: find out their real encoding,"
        " create a database of that encoding (create database … encoding 'UTF8' template"
        " template0), and load a pg_dump --encoding of it there",
    )
    yield from _privileges(pipeline.source.slot, server, slot_exists=slot_exists)
    yield from _options(pipeline, server)
    yield from _failover(pipeline, server)
    yield from problem_if(
        server.behind_pooler,
        "a connection pooler answers instead of the server: snapshots and locks need whole"
        " sessions; point the connection at PostgreSQL itself",
    )
    yield from problem_if(
        settings["search_path"] != "pg_catalog",
        "the session's settings didn't reach the server (a pooler drops the startup option"
        " 'options'): point the connection at PostgreSQL itself",
    )


def _privileges(slot: str, server: ServerFacts, *, slot_exists: bool) -> Iterator[Finding]:
    """Yields what the role lacks to make and read a slot."""
    if not server.can_replicate:
        on_rds = (
            "for replication slots; on Amazon RDS: grant rds_replication to"
            f" {sql_name(server.role)}"
        )
        yield lacking(
            f"role {server.role!r} may not use replication slots",
            RoleAttribute("replication", on_rds),
        )
    if not slot_exists and not server.can_make_slots:
        arguments = "name, name, boolean, boolean" + ", boolean" * (server.version >= 170000)
        yield owning(
            f"slot {slot!r} must be created: the role may not execute"
            " pg_create_logical_replication_slot or pg_drop_replication_slot",
            Grant("execute on function", f"pg_create_logical_replication_slot({arguments})"),
            Grant("execute on function", "pg_drop_replication_slot(name)"),
        )


def _free_slots(
    pipeline: PipelineFile, server: ServerFacts, slot_exists: bool
) -> Iterator[Finding]:
    total = server.number("max_replication_slots")
    verifies = pipeline.source.options.acknowledge == "get"
    needed, free = 2 * verifies + (not slot_exists), total - server.used_slots
    if free < needed:
        copies = (
            ["one for a copy during verification, one to keep after a mismatch"] if verifies else []
        )
        what = ", ".join([*copies, *([] if slot_exists else ["the slot itself"])])
        where = "" if pipeline.source.read_from is None else " of the standby of source.read_from"
        yield problem(
            f"replication slots{where}: {server.used_slots} of {total} are used, and slot"
            f" {pipeline.source.slot!r} needs {needed} more ({what}): drop unused"
            f" slots{' there' if where else ''}, or alter system set max_replication_slots ="
            f" {total + needed - free} and restart"
        )


def _options(pipeline: PipelineFile, server: ServerFacts) -> Iterator[Finding]:
    """Yields a problem for each option that the server's pgoutput lacks; it would fail at the first
    call.
    """
    options = pipeline.source.options
    version = server.settings.get("server_version")
    for is_asked, since, name in (
        (options.streaming == "on", 14, "streaming: on"),
        (options.streaming == "parallel", 16, "streaming: parallel"),
        (options.two_phase, 15, "two_phase: true"),
        (options.origin != "any", 16, f"origin: {options.origin}"),
    ):
        yield from problem_if(
            is_asked and server.version < since * 10_000,
            f"source.options.{name} needs PostgreSQL {since} or later, this is {version}: leave it"
            " out, or upgrade the server",
        )


def _failover(pipeline: PipelineFile, server: ServerFacts) -> Iterable[Finding]:
    """Returns findings about a slot that must survive a failover.

    Whether a standby keeps the slot can be seen only on the standby.
    """
    if not pipeline.source.failover:
        return ()
    if server.version < 170000:
        return [
            problem(
                "source.failover needs PostgreSQL 17 or later, this is"
                f" {server.settings.get('server_version')}: leave it out, or upgrade the server;"
                " without it a failover takes a resync of all tables"
            )
        ]
    return [
        *problem_if(
            pipeline.source.options.two_phase and server.version < 180000,
            "source.failover and source.options.two_phase don't go together before PostgreSQL 18,"
            " whose standbys can lose prepared transactions: leave one of them out",
        ),
        *warning_if(
            not server.settings.get("synchronized_standby_slots"),
            "synchronized_standby_slots is empty: runs may land changes that no standby has"
            " received, so after a failover the lake may be ahead of the source and need new"
            " copies; let it name the physical slot of the standby",
        ),
    ]


def _server_warnings(pipeline: PipelineFile, facts: Facts) -> Iterator[Finding]:
    limits, server = pipeline.slot_limits, facts.slot_server
    encoding, rate = facts.server.settings["server_encoding"], server.wal_bytes_per_hour
    speed = (
        f", and this server writes about {size(rate)} WAL an hour ({size(24 * rate)} a day)"
        if rate
        else ""
    )
    yield from warning_if(
        facts.server.superuser,
        f"role {facts.server.role} is a superuser: PostgreSQL calls functions of a table's"
        " owner when it plans a query, as the role that runs it, so each owner of a published"
        " table could do anything on this server: let the connection use the role that init"
        " writes",
    )
    yield from warning_if(
        encoding not in (*WITHIN_UTF8, "SQL_ASCII"),
        f"database {server.database} is in {encoding}, which stores bytes that UTF-8 has no"
        " character for; a row with one stops the slot, and with it all tables, until a resync"
        " (SlotUnreadable): look for such rows, or move to a database in UTF8",
    )
    yield from warning_if(
        server.number("max_slot_wal_keep_size") == -1,
        "max_slot_wal_keep_size is -1: while the pipeline pauses, its slot keeps WAL until"
        f" the disk is full; slots keep {size(server.retained_bytes)} now{speed}. To bound it:"
        f" alter system set max_slot_wal_keep_size = '{limits.critical_mb}MB' and reload;"
        " beyond that the slot is lost, and a resync has to compare all tables",
    )
    for setting, remedy in TIMEOUTS.items():
        # Snapshots and locks are on the primary, whichever server has the slot.
        is_of_slot = setting == "idle_replication_slot_timeout"
        value = (server if is_of_slot else facts.server).number(setting)
        unit = "s" if is_of_slot else "ms"
        yield from warning_if(value > 0, f"{setting} is {value} {unit}: {remedy}")
    limit = server.number("temp_file_limit")
    yield from warning_if(
        limit >= 0 and "temp_file_limit" in server.settings,
        f"temp_file_limit is {size(max(limit, 0) * 1024)}: the slot functions write a whole read"
        f" window to a temporary file, and a window has up to"
        f" {size(pipeline.batch.wal_window_mb << 20)} of WAL; lower batch.wal_window_mb, or raise"
        f" the limit for role {server.role}",
    )


def _slot(pipeline: PipelineFile, slot: SlotState | None) -> Iterable[Finding]:
    if slot is None:
        return ()
    try:
        check_ours(slot)
    except SlotForeign as err:
        return [problem(str(err))]
    reader, two_phase = slot.active_by or "", "on" if slot.two_phase else "off"
    return [
        *problem_if(
            slot.wal_status == "lost" or slot.invalidation_reason,
            str(lost_slot(slot.name, slot.confirmed_flush_lsn, slot.invalidation_reason)),
        ),
        *problem_if(
            slot.two_phase != pipeline.source.options.two_phase,
            f"slot {slot.name!r} was created with two_phase {two_phase}, the pipeline file says"
            " otherwise: correct source.options.two_phase, or name another slot",
        ),
        *problem_if(
            slot.active and not reader.startswith("waldelta "),
            f"slot {slot.name!r} is in use by pid {slot.active_pid} ({reader or 'no name'}): stop"
            " that reader, or give this pipeline a slot of its own",
        ),
    ]


# --- publications
# ------------------------------------------------------------------------------------------------


def _ownership(pipeline: PipelineFile, entry: Publication, facts: Facts) -> Iterator[Finding]:
    actual = facts.actual.get(entry.name)
    yield from problem_if(
        actual is None and not entry.manage,
        f"publication {entry.name!r} does not exist, and with manage: false setup never"
        " creates it: create it, or remove manage: false and say what it publishes",
    )
    if actual is None or not entry.manage:
        return
    maker = mark.pipeline if (mark := Mark.parse(actual.comment)) is not None else None
    yield from problem_if(
        maker is None,
        f"publication {entry.name!r} exists and wasn't made by this pipeline: write manage:"
        " false to read it as it is, choose another name, or drop it",
    )
    yield from problem_if(
        maker not in (None, pipeline.pipeline),
        f"publication {entry.name!r} was made by pipeline {maker!r}: choose another"
        " name, or write manage: false to read it as it is",
    )


def _scope(entry: Publication, state: PublicationState, facts: Facts) -> Iterator[Finding]:
    # Findings on another's publication, which setup doesn't alter, are warnings.
    finding_if = problem_if if entry.manage else warning_if
    yield from finding_if(
        not state.publish,
        f"publication {state.name!r} publishes no operation: "
        + ("name one in publish" if entry.manage else _NO_CHANGES),
    )
    schemas = f"schema {', '.join(state.schemas)}" if state.schemas else None
    whole = "all tables" if state.all_tables else schemas
    absent = sorted(set(state.schemas) - facts.schemas)
    listed = [str(t.id) for t in state.tables if t.columns is not None]
    yield from problem_if(
        state.publishes_generated and facts.server.version < 180000,
        f"publication {state.name!r}: publish_generated_columns needs PostgreSQL 18, this is"
        f" {facts.server.settings.get('server_version')}: remove it",
    )
    yield from problem_if(
        absent,
        f"publication {state.name!r}: schema {', '.join(absent)} does not exist: check its"
        " spelling",
    )
    yield from problem_if(
        state.schemas and listed,
        f"publication {state.name!r}: a column list ({', '.join(listed)}) can't be combined"
        " with schemas: publish the schemas in a publication of their own",
    )
    remedy = (
        "list the tables, or accept that with accept_future_tables: true"
        if entry.manage
        else "ask its owner to list the tables"
    )
    yield from finding_if(
        whole and state.publishes_old_rows and not entry.accept_future_tables,
        f"publication {state.name!r} publishes updates or deletes of {whole}: a table created"
        f" later without a primary key would refuse its own UPDATEs and DELETEs; {remedy}",
    )
    covered = facts.covered.get(entry.name, {})
    left_out = [str(table) for table, is_publishable in covered.items() if not is_publishable]
    yield from warning_if(
        left_out,
        f"publication {state.name!r}: {counted(len(left_out), 'relation')} of {whole} can't be"
        f" published (unlogged, temporary, foreign tables): {first_of(left_out)}",
    )


def _patterns(entry: Publication, facts: Facts) -> Iterator[Finding]:
    matched = [match for match in facts.matched if match.publication.name == entry.name]
    yield from (problem(match.problem) for match in matched if match.problem is not None)
    for pattern in entry.patterns:
        # A renamed schema would take all its tables out of the publication.
        if pattern.parts[0] not in facts.schemas:
            yield problem(
                f"publication {entry.name!r}: schema {pattern.parts[0]} of pattern {pattern.name}"
                " does not exist: check its spelling"
            )
        elif not any(pattern in match.entries for match in matched):
            yield warning(
                f"publication {entry.name!r}: pattern {pattern.name} stands for no table: check its"
                " spelling, or leave it for tables created later"
            )


# --- the standby in source.read_from
# ------------------------------------------------------------------------------------------------


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
        f" pg_log_standby_snapshot() to {facts.server.role}",
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
        " slot: point it at that server, not at a load balancer or a name of several standbys",
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
        " physical slot on the primary, and reload",
    )


_SERVER = """
select coalesce(host(inet_server_addr()), 'local') || ':' || coalesce(inet_server_port(), 0),
       pg_postmaster_start_time()::text
"""

"""Preflight refuses those random publications, and only those, that break statements."""

import os
import random
from contextlib import suppress

import psycopg

from tests.support.pipelines import job_for
from tests.support.seeds import chosen_seed
from waldelta.postgres import connect
from waldelta.stages.setup.setup import plan_setup

# What we refuse though PostgreSQL doesn't: a leaf whose old rows have other columns.
STRICTER = ("differs from the root's",)
COLUMNS = ("id", "a", "b", "g")
FILTERS = ("id > 3", "a = 1", "b is null", "id + a > 5", "a is null or b = 2")
IDENTITIES = ("default", "default", "full", "nothing", "using index {}_u")


def ddl(pick, schema, version):
    """A table, plain or partitioned, with replica identities of all kinds."""
    kind = pick.choice(("stored", "virtual")) if version >= 180000 else "stored"
    generated = f", g int generated always as (id * 2) {kind}" if pick.random() < 0.4 else ""
    key = pick.choice((", primary key (id)", ", primary key (id)", ""))
    split = " partition by range (id)" if pick.random() < 0.5 else ""
    yield (
        f"create schema {schema}; create table {schema}.t (id int not null, a int not null, b"
        f" int{generated}{key}){split}"
    )
    tables = ["t"]
    if split:
        yield f"create table {schema}.t_1 partition of {schema}.t for values from (0) to (10)"
        yield f"create table {schema}.t_2 partition of {schema}.t default"
        tables += ["t_1", "t_2"]
    identity = pick.choice(IDENTITIES)
    for table in tables:
        chosen = identity if pick.random() < 0.8 else pick.choice(IDENTITIES)
        if "index" in chosen:
            columns = "id, a" if split else pick.choice(("id, a", "a"))
            yield f"create unique index {table}_u on {schema}.{table} ({columns})"
        yield f"alter table {schema}.{table} replica identity {chosen.format(table)}"


def publications(pick, schema, tables, columns, version):
    """CREATE PUBLICATIONs, of which PostgreSQL may refuse some."""
    for number in range(pick.choice((1, 1, 2, 3))):
        members = []
        for table in pick.sample(tables, pick.randint(1, len(tables))):
            listed = (
                sorted(pick.sample(columns, pick.randint(1, len(columns))))
                if pick.random() < 0.35
                else None
            )
            where = pick.choice(FILTERS) if pick.random() < 0.35 else None
            members.append(
                f"table {schema}.{table}"
                + (f" ({', '.join(listed)})" if listed else "")
                + (f" where ({where})" if where else "")
            )
        if pick.random() < 0.15:
            members = [f"tables in schema {schema}"]
        operations = [
            o for o in ("insert", "update", "delete", "truncate") if pick.random() < 0.7
        ] or ["insert"]
        options = [
            f"publish = '{', '.join(operations)}'",
            f"publish_via_partition_root = {pick.random() < 0.5}",
        ]
        if version >= 180000 and pick.random() < 0.3:
            options.append("publish_generated_columns = stored")
        yield (
            f"{schema}_{number}",
            (
                f"create publication {schema}_{number} for {', '.join(members)} with"
                f" ({', '.join(options)})"
            ),
        )


def broken(database, schema, leaves, names, slot):
    """What PostgreSQL says once rows are written: the application's and decoding's errors."""
    found = []
    for number, table in enumerate(leaves):
        database.execute(
            f"insert into {schema}.{table} (id, a, b) values ({10 * number + 1}, 1, 1),"
            f" ({10 * number + 2}, 2, 2)"
        )
        for statement in (f"update {schema}.{table} set b = 3", f"delete from {schema}.{table}"):
            try:
                database.execute(statement)
            except psycopg.Error as err:
                found.append(str(err).splitlines()[0])
    try:
        database.execute(
            "select count(*) from pg_logical_slot_peek_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', %s)",
            (slot, ",".join(names)),
        )
    except psycopg.Error as err:
        found.append(str(err).splitlines()[0])
    database.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
    return found


def test_random_publications(any_database, lake):
    """The seed is printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer."""
    database = any_database
    seed = chosen_seed()
    slot = f"s_{database.name}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    wrong = []
    with connect(database.conninfo, "test") as conn:
        version = conn.info.server_version
        for number in range(20 * int(os.environ.get("WALDELTA_ROUNDS") or 1)):
            pick, schema = random.Random(seed + number), f"r{number}"
            statements = list(ddl(pick, schema, version))
            for statement in statements:
                database.execute(statement)
            columns = [c for c in COLUMNS if c != "g" or "generated" in statements[0]]
            leaves = ["t_1", "t_2"] if "partition by" in statements[0] else ["t"]
            tables = ["t", *leaves] if leaves != ["t"] else ["t"]
            made = {}
            for name, statement in publications(pick, schema, tables, columns, version):
                with suppress(psycopg.Error):
                    database.execute(statement)
                    made[name] = statement
            if made:
                entries = [{"name": name, "manage": False} for name in made]
                plan = plan_setup(conn, job_for(database, lake, *entries))
                assert plan.statements == ()  # somebody else's publications are never altered
                # The application's own statements fail already, which is nothing to refuse.
                told = [
                    text
                    for text in plan.warnings
                    if "so its own UPDATEs" in text or "so its own DELETEs" in text
                ]
                problems = [*plan.problems, *told]
                says = broken(database, schema, leaves, list(made), slot)
                judged = [p for p in problems if not any(text in p for text in STRICTER)]
                refused = [p for p in judged if p not in told]
                stops = [
                    text for text in says if not text.startswith(("cannot update", "cannot delete"))
                ]
                if (says and not problems) or (judged and not says) or (refused and not stops):
                    wrong.append(
                        (
                            f"WALDELTA_SEED={seed + number}",
                            [*statements, *made.values()],
                            {"PostgreSQL": says, "we": problems},
                        )
                    )
            for name in made:
                database.execute(f"drop publication {name}")
            database.execute(f"drop schema {schema} cascade")
    for case in wrong:
        print(case[0], *case[1], case[2], sep="\n  ")
    assert not wrong, (len(wrong), wrong[0])

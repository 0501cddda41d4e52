"""A server whose slot functions send wrong messages, in one test's database."""

CHANGES = {
    "unknown kind": "set_byte(data, 0, 122)", "kind of a Stream Stop": "set_byte(data, 0, 69)",
    "empty": "substr(data, 1, 0)", "cut to 6 bytes": "substr(data, 1, 6)",
    "cut to 3 bytes": "substr(data, 1, 3)",
    "without its last byte": "substr(data, 1, length(data) - 1)",
    "a byte too long": "data || '\\x00'", "another count of columns": "set_byte(data, 7, 77)",
    "unknown flags": "set_byte(data, 5, 255)", "unknown first flags": "set_byte(data, 1, 2)",
    "not UTF-8": "overlay(data placing '\\xff' from length(data))", "twice": "data", "lost": "data",
}  # fmt: skip


def tamper_with(database) -> None:
    """Put functions of ours in the place of the server's, which change nothing yet."""
    database.execute("set allow_system_table_mods = on")
    database.execute("create table tampered (kind text, part bytea, change text)")
    cases = " ".join(f"when '{name}' then {changed}" for name, changed in CHANGES.items())
    for verb in ("peek", "get"):
        name = f"pg_logical_slot_{verb}_binary_changes"
        database.execute(
            f"alter function pg_catalog.{name}(name, pg_lsn, int, text[]) rename to real_{verb}"
        )
        database.execute(f"""
            create function pg_catalog.{name}(
                slot name, upto pg_lsn, most int, variadic options text[], out lsn pg_lsn,
                  out xid xid, out data bytea
            ) returns setof record language sql as $$
            select lsn, xid, case change {cases} else data end
            from pg_catalog.real_{verb}(slot, upto, most, variadic options) with ordinality
              as given(lsn, xid, data, n)
            left join lateral (
                select change from public.tampered t
                where get_byte(data, 0) = ascii(t.kind) and position(t.part in data) > 0
                limit 1
            ) as found on true
            cross join generate_series(1, case change when 'twice' then 2 when 'lost' then 0
              else 1 end)
            order by n
            $$
            """)


def send_wrong(database, kind: str, part: bytes, change: str) -> None:
    """From now on messages of this kind with these bytes are changed, and no others."""
    send_right(database)
    database.execute("insert into tampered values (%s, %s, %s)", (kind, part, change))


def send_right(database) -> None:
    """Nothing is changed any more."""
    database.execute("delete from tampered")

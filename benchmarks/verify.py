"""Checks that a lake equals its source: rows and a checksum of all values, by programs that share
no code with ours.

PostgreSQL adds up its side, DuckDB's reader of Delta the other: 60 bits of the MD5 of each row's
values as text.
"""

from __future__ import annotations

from importlib.resources import files

import duckdb

from benchmarks.place import Place

# By the source's types: the expressions that produce the same text on both sides from a column. A
# numeric must not be without digits before the point, as (2,2) is.
_TEXTS = {
    "bigint": ("{}::text", "{}::text"),
    "integer": ("{}::text", "{}::text"),
    "text": ("{}", "{}"),
    "uuid": ("{}::text", "{}"),
    "numeric": ("{}::text", "{}::text"),
    "timestamp with time zone": (
        "(extract(epoch from {}) * 1000000)::bigint::text",
        "epoch_us({})::text",
    ),
}
_CHECKSUMS = (
    (
        "select count(*), sum(('x' || substr(md5({row}), 1, 15))::bit(60)::bigint)::text from"
        " {table} where {where}"
    ),
    (
        "select count(*), sum(('0x' || substr(md5({row}), 1, 15))::bigint)::text from {table} where"
        " {where}"
    ),
)


def duckdb_of_delta() -> duckdb.DuckDBPyConnection:
    """Returns DuckDB with its own reader of Delta, in the pinned version; nothing is downloaded."""
    connection = duckdb.connect(config={"autoinstall_known_extensions": False})
    connection.load_extension(delta_extension())
    return connection


def delta_extension() -> str:
    """Returns the file of that reader in its wheel."""
    return str(
        files("duckdb_extension_delta")
        / "extensions"
        / f"v{duckdb.__version__}"
        / "delta.duckdb_extension"
    )


def compare_with_source(
    who: str, place: Place, targets: dict[str, str], where: str = "true"
) -> None:
    """Compare each table, or its rows that meet a condition, with its target's folder.

    Raises RuntimeError where they differ.
    """
    with duckdb_of_delta() as lake:
        for table, folder in targets.items():
            of_source, of_target = _queries(place, table, folder, where)
            (there,), here = place.sql(of_source), lake.execute(of_target).fetchone()
            if here != there:
                raise RuntimeError(
                    f"{who}'s {table} (rows, checksum) is {here}, the source's {there}"
                )


def _queries(place: Place, table: str, folder: str, where: str) -> list[str]:
    columns = place.sql(
        f"""
        select quote_ident(attname), format_type(atttypid, null) from pg_attribute
         where attrelid = '{table}'::regclass and attnum > 0 and not attisdropped order by attnum"""
    )
    scanned = folder.replace("'", "''")
    queries = []
    for side, (query, of) in enumerate(
        zip(_CHECKSUMS, (table, f"delta_scan('{scanned}')"), strict=True)
    ):
        texts = (_TEXTS[kind][side].format(name) for name, kind in columns)
        # Nulls are distinguished from empty texts, and each value's end from the next one's start.
        row = " || ".join(f"coalesce('+' || {text} || '|', '-')" for text in texts)
        queries.append(query.format(row=row, table=of, where=where if side == 0 else "true"))
    return queries

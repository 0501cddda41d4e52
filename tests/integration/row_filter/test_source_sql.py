"""A stored filter that is printed again means what PostgreSQL printed."""

import random
import re

from psycopg import sql

from tests.oracles import row_filter_generator as generator
from tests.support.seeds import chosen_seed
from waldelta.errors import ConfigError, FilterNotTranslatable
from waldelta.postgres import TableId
from waldelta.postgres.catalog import read_relations, read_table_oids
from waldelta.row_filter import resolve_filter
from waldelta.row_filter.parse import TypeName, parse_analysed
from waldelta.row_filter.source_sql import source_sql

TABLE = TableId("public", "t")
FILTERS = 60
AS_TEXT = repr(TypeName("text"))
AGAIN = """
select pg_get_expr(conbin, conrelid) from pg_constraint where conname = 'again'
"""


def test_the_server_reads_the_same_filter(any_database, any_conn):
    """Random filters of every function; the server prints both texts alike."""
    any_database.execute(generator.DDL)
    assert compared(any_conn, random.Random(chosen_seed())) > FILTERS / 3


def shape(text):
    """What a text means, in whichever syntax: TRIM(…) is btrim(…), and EXTRACT's field a text."""
    tree = re.sub(r", start=\d+", "", repr(parse_analysed(text)))
    return re.sub(rf"Cast\(operand=(Literal\([^()]*\)), type={re.escape(AS_TEXT)}\)", r"\1", tree)


def compared(conn, rng):
    """How many of the filters could be compared."""
    (oid,) = read_table_oids(conn, [TABLE]).values()
    (relation,) = read_relations(conn, [oid])
    types, count = {column.name: column.type for column in relation.columns}, 0
    for _ in range(FILTERS):
        try:
            analysed = resolve_filter(conn, TABLE, generator.expression(rng)).analysed
            printed = source_sql(analysed, types)
        except (ConfigError, FilterNotTranslatable):
            continue
        if "\\" not in printed:  # E'' isn't among what PostgreSQL prints.
            parse_analysed(printed)
        conn.execute(
            sql.SQL("alter table public.t add constraint again check ({})").format(sql.SQL(printed))
        )
        ((again,),) = conn.execute(AGAIN).fetchall()
        assert shape(again) == shape(analysed)
        conn.execute("alter table public.t drop constraint again")
        count += 1
    return count

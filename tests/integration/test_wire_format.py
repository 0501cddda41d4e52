"""Binary values against the text that the same server prints: the server is the oracle for every type."""

from __future__ import annotations

import random

import psycopg
import pyarrow as pa
import pytest

from waldelta.connection import connect
from waldelta.type_catalog import PgType
from waldelta.type_map import target_type
from waldelta.types.wire_format import text_of

pytestmark = pytest.mark.pg

VALUES = {
    "bool": ["t", "f"],
    "int2": ["0", "-1", "32767", "-32768"],
    "int4": ["0", "-1", "2147483647", "-2147483648"],
    "int8": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "oid": ["0", "4294967295"],
    "float4": ["0", "-0", "1.5", "NaN", "Infinity", "-Infinity", "3.4028235e+38", "1e-45", "0.1"],
    "float8": ["0", "-0", "1.5", "NaN", "Infinity", "-Infinity", "1.7976931348623157e+308", "5e-324", "0.1", "1e22"],
    "text": ["", "a", "é", "x" * 3000],
    "varchar": ["", "a"],
    "bpchar": ["a  ", "é"],
    "name": ["n"],
    "json": ['{"a":  1}', "null"],
    "jsonb": ['{"a":  1, "é": [1.0]}', "null"],
    "bytea": ["\\x", "\\x00ff10", "\\x" + "ab" * 999],
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "date": ["2000-01-01", "1970-01-01", "0001-01-01", "0001-12-31 BC", "4713-11-24 BC", "9999-12-31", "10000-01-01",
             "5874897-12-31", "infinity", "-infinity", "2024-02-29", "0045-02-28 BC"],
    "timestamp": ["2000-01-01", "1999-12-31 23:59:59.999999", "0001-01-01 00:00:00", "4713-11-24 BC 00:00:01.5",
                  "294276-12-31 23:59:59.999999", "infinity", "-infinity", "2024-02-29 12:00:00.1", "10000-01-01 01:02:03"],
    "timestamptz": ["2000-01-01 00:00+00", "1999-12-31 23:59:59.999999+02", "4714-11-24 00:00:00+00 BC",
                    "294276-12-31 23:59:59.9+00", "infinity", "-infinity", "10000-01-01 01:02:03+00"],
    "numeric": ["0", "0.00", "-0.001", "1", "-1.50", "NaN", "Infinity", "-Infinity", "1e100", "1e-100", "12345678.9", "10000",
                "99999999.00010000", "0.0001", "0.00001", "123456789012345678901234567890.123456789", "-10000.0", "1000000000000"],
}  # fmt: skip
# Where every value has its place in the type, another spelling of the same value will do.
SPELLED_ANYHOW = {"float4": 700, "float8": 701}


def printed_and_sent(database, type_name, values):
    """Text and binary format of values, as an output plugin gets them."""
    with connect(database.conninfo, "test") as connection:
        query = (
            f"select v::text::pg_catalog.{type_name} as v from unnest(%s::text[]) with ordinality as x(v, n) order by n"
        )
        found = {}
        for format_ in (psycopg.pq.Format.TEXT, psycopg.pq.Format.BINARY):
            result = connection.pgconn.exec_params(
                query.replace("%s", "$1").encode(), [connection_array(values)], result_format=format_
            )
            assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
            found[format_] = [result.get_value(row, 0) for row in range(result.ntuples)]
    return found[psycopg.pq.Format.TEXT], found[psycopg.pq.Format.BINARY]


def connection_array(values):
    quoted = ('"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' if v is not None else "NULL" for v in values)
    return ("{" + ",".join(quoted) + "}").encode()


@pytest.mark.parametrize("type_name", VALUES)
def test_the_text_is_what_the_server_prints(database, type_name):
    """To the letter, or to the bit for floats; nulls stay null, slices are read at their own offset."""
    text, sent = printed_and_sent(database, type_name, [*VALUES[type_name], None])
    found = text_of(pa.array([b"junk", *sent], pa.binary()).slice(1), type_name)
    if type_name in SPELLED_ANYHOW:
        kind = target_type(PgType(SPELLED_ANYHOW[type_name], -1, type_name))
        assert repr(kind.from_text(found)[0].to_pylist()) == repr(
            kind.from_text(pa.array(text, pa.binary()))[0].to_pylist()
        )
        return
    if type_name.startswith("timestamp"):
        # Within the calendar Arrow prints six places always; it is the value that counts there.
        kind = target_type(PgType({"timestamp": 1114, "timestamptz": 1184}[type_name], -1, type_name))
        for actual, expected in zip(kind.from_text(found), kind.from_text(pa.array(text, pa.binary())), strict=True):
            assert actual.equals(expected)
        return
    assert found.to_pylist() == text


def test_random_numerics(database):
    """Any number of digits before and behind the point."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    values = []
    for _ in range(3000):
        whole = "".join(rng.choice("0123456789") for _ in range(rng.choice([0, 1, 4, 5, 20]))) or "0"
        part = "".join(rng.choice("0009") for _ in range(rng.choice([0, 1, 3, 4, 9])))
        values.append(rng.choice(["", "-"]) + whole + ("." + part if part else ""))
    text, sent = printed_and_sent(database, "numeric", values)
    assert text_of(pa.array(sent, pa.binary()), "numeric").to_pylist() == text

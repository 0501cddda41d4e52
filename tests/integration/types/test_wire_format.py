"""Binary values against the text that the same server prints, for every type."""

import psycopg
import pyarrow as pa
import pytest

from tests.support.seeds import chosen_random
from waldelta.errors import DecodeError
from waldelta.postgres import PgType, connect
from waldelta.types.type_map import target_type
from waldelta.types.wire.wire_format import text_of

VALUES = {
    "bool": ["t", "f"],
    "int2": ["0", "-1", "32767", "-32768"],
    "int4": ["0", "-1", "2147483647", "-2147483648"],
    "int8": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "oid": ["0", "4294967295"],
    "float4": ["0", "-0", "1.5", "NaN", "Infinity", "-Infinity", "3.4028235e+38", "1e-45", "0.1"],
    "float8": ["0", "-0", "1.5", "NaN", "Infinity", "-Infinity", "1.7976931348623157e+308",
               "5e-324", "0.1", "1e22"],
    "text": ["", "a", "é", "x" * 3000],
    "varchar": ["", "a"],
    "bpchar": ["a  ", "é"],
    "name": ["n"],
    "json": ['{"a":  1}', "null"],
    "jsonb": ['{"a":  1, "é": [1.0]}', "null"],
    "bytea": ["\\x", "\\x00ff10", "\\x" + "ab" * 999],
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "date": ["2000-01-01", "1970-01-01", "0001-01-01", "0001-12-31 BC", "4713-11-24 BC",
             "9999-12-31", "10000-01-01", "5874897-12-31", "infinity", "-infinity", "2024-02-29",
             "0045-02-28 BC"],
    "timestamp": ["2000-01-01", "1999-12-31 23:59:59.999999", "0001-01-01 00:00:00",
                  "4713-11-24 BC 00:00:01.5", "294276-12-31 23:59:59.999999", "infinity",
                  "-infinity", "2024-02-29 12:00:00.1", "10000-01-01 01:02:03"],
    "timestamptz": ["2000-01-01 00:00+00", "1999-12-31 23:59:59.999999+02",
                    "4714-11-24 00:00:00+00 BC", "294276-12-31 23:59:59.9+00", "infinity",
                    "-infinity", "10000-01-01 01:02:03+00"],
    "numeric": ["0", "0.00", "-0.001", "1", "-1.50", "NaN", "Infinity", "-Infinity", "1e100",
                "1e-100", "12345678.9", "10000", "99999999.00010000", "0.0001", "0.00001",
                "123456789012345678901234567890.123456789", "-10000.0", "1000000000000"],
}  # fmt: skip
VALUES |= {
    "char": ["", "a", "\\377", "\\001"],
    "jsonpath": ['$."a"[*] ? (@ > 1)'],
    "bit(3)": ["101", "000"],
    "bit(16)": ["1010101011110000"],
    "varbit": ["", "1", "10101", "1" * 8, "0" * 9, "10" * 100],
    "money": ["0", "0.05", "-0.05", "12.5", "1234567.89", "-1234567.89", "999.99", "1000",
              "92233720368547758.07", "-92233720368547758.08"],
    "xid": ["0", "4294967295"],
    "xid8": ["0", "18446744073709551615"],
    "pg_lsn": ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"],
    "time": ["00:00:00", "24:00:00", "12:34:56.789", "23:59:59.999999", "00:00:00.00001",
             "10:00:10"],
    "timetz": ["12:34:56.789+05:30", "00:00:00-15:59:59", "24:00:00+00", "01:02:03-08",
               "01:02:03+00:00:01"],
    "interval": ["0", "1 year 2 mons -3 days 04:05:06.789", "-178000000 years", "-1 day +01:00:00",
                 "1 mon", "-1 mon 1 day", "1 day", "-1 year -1 mon", "00:00:01", "-00:00:00.000001",
                 "100:00:00", "2562047788:00:54.775807", "-1 mon +2 days -00:00:05",
                 "1 year -1 mon", "-2147483648 days", "2147483647 mons", "23 mons",
                 "-23 mons -1 days +00:01", "1 day -00:01"],
    "inet": ["1.2.3.4", "1.2.3.4/24", "0.0.0.0/0", "::1", "::", "fe80::1/64", "::ffff:1.2.3.4",
             "::1.2.3.4", "::1.2.0.0", "1::", "1:0:0:2::3", "::5:0:0", "2001:db8:0:1:1:1:1:1",
             "1:2:3:4:5:6:7:8/0", "1:0:2:0:3:0:4:0", "::2", "::1:0", "0:0:0:0:0:1:2:3",
             "::ffff:0:0"],
    "cidr": ["10.0.0.0/8", "1.2.3.4/32", "::/0", "2001:db8::/32", "::1/128"],
    "macaddr": ["08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "point": ["(1,2.5)", "(NaN,Infinity)", "(-0,-Infinity)", "(1e-5,0.0001)", "(1e15,1e14)",
              "(123456789012345,1234567890123456)", "(1e300,5e-324)", "(0.1,100000)",
              "(1.7976931348623157e308,3)"],
    "lseg": ["[(0,0),(1,1)]"],
    "box": ["(2,2),(1,1)"],
    "line": ["{1,-1,0}"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1))"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),5>"],
    "int4range": ["[1,5)", "empty", "(,)", "[1,)", "(,1)"],
    "int8range": ["[-9223372036854775808,9223372036854775807)"],
    "numrange": ["[1.50,2)", "(-Infinity,Infinity]", "[NaN,NaN]", "(1,)"],
    "daterange": ["[2020-01-01,infinity)", "[0044-03-15 BC,2020-01-01)"],
    "tsrange": ['["2020-01-01 10:00:00","2020-01-01 10:00:00.5")',
                '["0044-03-15 00:00:00 BC",infinity]'],
    "tstzrange": ['["2020-01-01 00:00:00+00",infinity]', '["2020-01-01 00:00:00.123456+00",)',
                  '["0044-03-15 00:00:00+00 BC",)'],
    "int4multirange": ["{[1,2),[5,7)}", "{}", "{(,3),[9,)}"],
    "tstzmultirange": ['{["2020-01-01 00:00:00+00","2020-01-02 00:00:00+00"),[2021-01-01,)}'],
    "int2vector": ["1 2 3", "", "-1"],
    "oidvector": ["1 4294967295", ""],
    "int2[]": ["{1,NULL,-3}", "{}", "{7}", "{{1,2},{3,4}}", "[0:1]={1,2}", "[2:2]={5}", "{{1}}",
               "{{{1,2}},{{3,NULL}}}"],
    "int4[]": ["{1,NULL,-3}", "{}", "{" + ",".join(map(str, range(5000))) + "}",
               "[-1:0][5:6]={{1,2},{3,4}}", "{NULL}", "{NULL,NULL}"],
    "int8[]": ["{9223372036854775807}"],
    "bool[]": ["{t,f,NULL}"],
    "numeric[]": ["{1.500,NaN,NULL,-Infinity,1e40}", "{{1.0},{0.00}}"],
    "text[]": ["{}", '{a,"b,c","NULL",NULL,"null",""}', '{"a\\"b","c\\\\d","{x}"," ",x}',
               '{"\\\\\\""}', "{ü}", '{{a,b},{c,"d}"}}', '[-1:0]={"a,",NULL}',
               '{"a\nb","c\td","nulls",nUlL}', '{"\v","\f","\r"}', "{;}", "{\u00a0,\u3000}"],
    "varchar[]": ["{abc,NULL}"],
    "bpchar[]": ['{"a  "}'],
    "bytea[]": ['{"\\\\x00ff",NULL,"\\\\x"}'],
    "date[]": ["{2020-01-01,NULL}", "{infinity,0044-03-15 BC}"],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "jsonb[]": ['{"{\\"a\\": [1, 2]}","\\"x\\\\\\\\y\\"",NULL}'],
    "box[]": ["{(2,2),(1,1);(4,4),(3,3)}", "{NULL}"],
    "point[]": ['{"(1,2)","(1e-7,0)"}'],
    "int4range[]": ['{"[1,5)",empty}'],
    "tsrange[]": ['{"[\\"2020-01-01 10:00:00\\",)"}'],
    "interval[]": ['{"1 day","00:00:01"}'],
    "inet[]": ["{1.2.3.4,::1}"],
    "money[]": ['{"1,000.50","2"}'],
    # The elements are floats and timestamps printed to the letter, for these arrays stay text.
    "float8[]": ["{{1e-05,100000},{1e15,NaN}}", "[0:0]={1e+22}"],
    "float4[]": ["{{1e-05,100000},{1e6,0.1}}"],
    "timestamp[]": ['{"2020-01-01 10:00:00.5","2020-01-01 00:00:00",infinity,NULL}',
                    '{{"2020-01-01 10:00:00"},{"2020-01-01 10:00:00.5"}}',
                    '[0:1]={"0044-03-15 01:00:00 BC",infinity}'],
    "timestamptz[]": ['{"2020-01-01 10:00:00.12+00",-infinity}',
                      '{"0044-03-15 01:00:00.50+00 BC","2020-01-01 10:00:00+00"}',
                      '{{"2020-01-01 10:00:00+00"},{"10000-01-01 10:00:00.10+00"}}'],
}  # fmt: skip
# Where every value has its place in the type, another spelling of the same value will do.
SPELLED_ANYHOW = {"float4": 700, "float8": 701}


def printed_and_sent(database, type_name, values):
    """Text and binary format of values, as an output plugin gets them."""
    with connect(database.conninfo, "test") as connection:
        sql_name = f'"{type_name}"' if type_name == "char" else type_name
        query = (
            f"select v::text::pg_catalog.{sql_name} as v from unnest(%s::text[]) with ordinality as"
            " x(v, n) order by n"
        )
        found = {}
        for format_ in (psycopg.pq.Format.TEXT, psycopg.pq.Format.BINARY):
            result = connection.pgconn.exec_params(
                query.replace("%s", "$1").encode(),
                [connection_array(values)],
                result_format=format_,
            )
            assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
            found[format_] = [result.get_value(row, 0) for row in range(result.ntuples)]
    return found[psycopg.pq.Format.TEXT], found[psycopg.pq.Format.BINARY]


def connection_array(values):
    quoted = (
        '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' if v is not None else "NULL"
        for v in values
    )
    return ("{" + ",".join(quoted) + "}").encode()


@pytest.mark.parametrize("type_name", VALUES)
def test_the_text_is_what_the_server_prints(any_database, type_name):
    """To the letter, or to the bit for floats; slices are read at their own offset."""
    text, sent = printed_and_sent(any_database, type_name, [*VALUES[type_name], None])
    wire = type_name.partition("(")[0]
    found = text_of(pa.array([b"junk", *sent], pa.binary()).slice(1), wire)
    # In the company of many, of none, and of nulls alone.
    for given, expected in ((sent * 40, found.to_pylist() * 40), ([], []), ([None], [None])):
        assert text_of(pa.array(given, pa.binary()), wire).to_pylist() == expected
    for one, expected in zip(sent, found.to_pylist(), strict=True):
        assert text_of(pa.array([one], pa.binary()), wire).to_pylist() == [expected]
    if type_name in SPELLED_ANYHOW:
        kind = target_type(PgType(SPELLED_ANYHOW[type_name], -1, type_name))
        assert repr(kind.from_text(found)[0].to_pylist()) == repr(
            kind.from_text(pa.array(text, pa.binary()))[0].to_pylist()
        )
        return
    if type_name in ("timestamp", "timestamptz"):
        # Within the calendar Arrow prints six places always; it is the value that counts there.
        kind = target_type(
            PgType({"timestamp": 1114, "timestamptz": 1184}[type_name], -1, type_name)
        )
        for actual, expected in zip(
            kind.from_text(found), kind.from_text(pa.array(text, pa.binary())), strict=True
        ):
            assert actual.equals(expected)
        return
    assert found.to_pylist() == text


@pytest.mark.parametrize(
    "type_name",
    ["float4", "float8", "timestamp", "timestamptz", "float4[]", "float8[]", "timestamp[]"],
)
def test_columns_that_stay_text_are_printed_to_the_letter(any_database, type_name):
    """As a copy has them: rows may be found by them."""
    more = ['{1e-05,100000,1e15,NaN,"-0"}'] if type_name in ("float4[]", "float8[]") else []
    text, sent = printed_and_sent(any_database, type_name, [*VALUES[type_name], *more, None])
    assert text_of(pa.array(sent, pa.binary()), type_name, is_exact=True).to_pylist() == text


def test_random_numerics(any_database):
    """Any number of digits before and behind the point."""
    rng = chosen_random()
    values = []
    for _ in range(3000):
        whole = (
            "".join(rng.choice("0123456789") for _ in range(rng.choice([0, 1, 4, 5, 20]))) or "0"
        )
        part = "".join(rng.choice("0009") for _ in range(rng.choice([0, 1, 3, 4, 9])))
        values.append(rng.choice(["", "-"]) + whole + ("." + part if part else ""))
    text, sent = printed_and_sent(any_database, "numeric", values)
    assert text_of(pa.array(sent, pa.binary()), "numeric").to_pylist() == text


ELEMENTS = [
    t
    for t in VALUES
    if not t.endswith("[]")
    and "(" not in t
    and t not in ("char", "float4", "float8", "timestamp", "timestamptz")
]


def test_random_arrays(any_database):
    """Elements of every type, null or not, in one dimension and in more, beside each other."""
    rng = chosen_random()
    for name in ELEMENTS:
        delimiter = ";" if name == "box" else ","

        def element(name=name):
            text = rng.choice([None, *VALUES[name]])
            return (
                "NULL"
                if text is None
                else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
            )

        values = []
        for _ in range(60):
            if rng.random() < 0.8:
                values.append(
                    "{" + delimiter.join(element() for _ in range(rng.randrange(6))) + "}"
                )
            else:
                rows = (
                    "{" + delimiter.join(element() for _ in range(2)) + "}"
                    for _ in range(rng.randrange(1, 4))
                )
                values.append("{" + delimiter.join(rows) + "}")
        text, sent = printed_and_sent(any_database, f"{name}[]", values)
        assert (name, text_of(pa.array(sent, pa.binary()), f"{name}[]").to_pylist()) == (name, text)


def damaged(rng, value):
    """Cut, with a byte flipped, or with bytes behind it."""
    choice = rng.randrange(3)
    if choice == 0 and value:
        return value[: rng.randrange(len(value))]
    if choice == 1 and value:
        at = rng.randrange(len(value))
        return (
            value[:at]
            + bytes([rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])])
            + value[at + 1 :]
        )
    return value + rng.randbytes(rng.randrange(1, 6))


@pytest.mark.parametrize("type_name", VALUES)
def test_damaged_values_are_named_or_read(database, type_name):
    """No crash, no hang: DecodeError, or one text per value, and the undamaged ones' as ever."""
    rng = chosen_random()
    wire = type_name.partition("(")[0]
    _, sent = printed_and_sent(database, type_name, [v for v in VALUES[type_name] if len(v) < 500])
    good = text_of(pa.array(sent, pa.binary()), wire).to_pylist()
    for _ in range(150):
        given = [*sent, None]
        at = rng.randrange(len(sent))
        given[at] = damaged(rng, given[at])
        try:
            found = text_of(pa.array(given, pa.binary()), wire)
        except DecodeError:
            continue
        found.validate(full=True)
        others = found.to_pylist()
        assert others[:at] + others[at + 1 :] == [*good, None][:at] + [*good, None][at + 1 :]

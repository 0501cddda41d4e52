"""Random typed filters and random rows with the values that systems disagree on."""

import random
import re

DDL = """
create table public.t (
    id int primary key, a int, b int, s smallint, l bigint, n numeric(12,2),
    m numeric(20,6), f real, d double precision,
    t text collate "C", u text collate "C", v varchar(8) collate "C", c char(5) collate "C",
      p boolean, q boolean,
    day date, day2 date, at timestamp, at2 timestamp, tz timestamptz, g uuid, y bytea, ia int[],
      ta text[] collate "C",
    j jsonb, x numeric
)
"""
_TEXTS = [
    "", " ", "a", "A", "ab", "a b", "JFK", "jfk ", "%_x", "it's", "back\\slash", "é", "ÉA", "日本",
    "🙂x🙂", "line\nbreak", "line\n", "tab\t", '"q"', "${x}", "{0}", "a,b,c", "00", "-1", "i", "İı",
    "aaaaaaaaab",
]  # fmt: skip
_DATES = [
    "2024-02-29", "2024-01-31", "1970-01-01", "0001-01-01", "9999-12-31", "infinity", "-infinity",
    "0044-03-15 BC", "12024-01-01", "2000-12-31", "2021-01-03",
]  # fmt: skip
_TIMES = [
    "2024-02-29 12:34:56.789", "1969-12-31 23:59:59.999999", "0001-01-01 00:00:00",
    "9999-12-31 23:59:59.999999", "infinity", "-infinity", "0044-03-15 10:00:00 BC",
    "12024-01-01 00:00:01", "2024-01-31 00:00:00", "2024-02-29 00:00:00",
]  # fmt: skip
_INTS = ["0", "1", "-1", "2", "3", "7", "10", "100", "-100", "2147483647", "-2147483648", "32767"]
VALUES: dict[str, list[str]] = {
    "a": _INTS,
    "b": _INTS,
    "s": ["0", "1", "-1", "5", "32767", "-32768"],
    "l": ["0", "1", "-1", "12", "9223372036854775807", "-9223372036854775808", "2147483648"],
    "n": ["0", "1", "-1", "0.50", "-0.50", "1.50", "2.50", "9999999999.99", "-9999999999.99", "NaN",
          "0.01", "7.25"],
    "m": ["0", "1", "-1.5", "0.000001", "2.5", "99999999999999.999999", "NaN", "0.5", "7.25",
          "-0.5"],
    "f": ["0", "-0", "1", "1.1", "NaN", "Infinity", "-Infinity", "3.4028235e38", "1e-45", "2.5",
          "-2.5", "16777217"],
    "d": ["0", "-0", "1", "1.1", "NaN", "Infinity", "-Infinity", "1.7976931348623157e308", "5e-324",
          "0.5", "1.5", "2.5", "-2.5", "2147483647.5", "9223372036854775808", "1e15", "0.1"],
    "t": _TEXTS,
    "u": _TEXTS,
    "v": [x[:8] for x in _TEXTS],
    "c": [x[:5] for x in _TEXTS],
    "p": ["t", "f"],
    "q": ["t", "f"],
    "day": _DATES,
    "day2": _DATES,
    "at": _TIMES,
    "at2": _TIMES,
    "tz": [x.replace(" BC", "+00 BC") for x in _TIMES],
    "g": ["6ecd8c99-4036-403d-bf84-cf8400f67836", "00000000-0000-0000-0000-000000000000",
          "ffffffff-0000-0000-0000-000000000001"],
    "y": ["\\x", "\\x00", "\\x01ff", "\\xff"],
    "ia": ["{}", "{1}", "{1,2,3}", "{NULL}", "{1,NULL}", "{2,1}", "{7,7,7}", "[0:1]={1,2}",
           "{{1,2},{3,4}}"],
    "ta": ["{}", "{a}", '{a,"b c",NULL}', '{"",JFK}', '{"it\'s","\\\\"}'],
    "j": ["{}", "null", '{"a": 1}'],
    "x": ["1.0", "NaN", "1e50"],
}  # fmt: skip

CONSTANTS: dict[str, list[str]] = {
    "int4": ["0", "1", "2", "3", "-1", "10", "2147483647", "null::int"],
    "int2": ["1::int2", "5::int2", "(-1)::int2"],
    "int8": ["5000000000", "1::int8", "(-9223372036854775808)"],
    "numeric": ["0.5", "1.0", "2.50", "-7.25", "'NaN'::numeric", "1e3", "0::numeric"],
    "float4": ["1.1::real", "'NaN'::real", "2::real"],
    "float8": ["0.5::float8", "'NaN'::float8", "'Infinity'::float8", "2::float8", "1e200::float8",
               "-0.0::float8"],
    "text": ["'a'", "''", "'JFK'", "'it''s'", "'back\\slash'", "'b'", "' '", "'🙂'", "'${x}'",
             "'é'", "'line\n'"],
    "varchar": ["'a'::varchar", "'JFK'::varchar"],
    "bpchar": ["'a'::bpchar", "'JFK  '::bpchar", "''::bpchar"],
    "bool": ["true", "false", "null::bool"],
    "date": ["date '2024-02-29'", "date 'infinity'", "date '1970-01-01'", "date '0044-03-15 BC'",
             "date '12024-01-01'"],
    "timestamp": ["timestamp '2024-02-29 12:34:56.789'", "timestamp '-infinity'",
                  "timestamp '2024-01-31'", "timestamp '0044-03-15 BC'"],
    "timestamptz": ["timestamptz '2024-02-29 12:34:56.789+00'", "timestamptz 'infinity'"],
    "uuid": ["uuid '6ecd8c99-4036-403d-bf84-cf8400f67836'"],
    "bytea": ["'\\x01ff'::bytea", "''::bytea"],
    "intarray": ["'{1,2}'::int[]", "'{}'::int[]", "array[1]", "'{NULL,1}'::int[]"],
    "textarray": ["array['a']", "'{a,NULL}'::text[]", "'{}'::text[]"],
    "pattern": ["'a%'", "'%b'", "'%_x'", "'a\\%'", "'_'", "'%'", "''", "'%it''s%'", "'🙂_🙂'",
                "'%line%break'", "'J_K'", "'\\\\%'", "'back\\\\%'"],
    "regex": ["'^a'", "'b$'", "'^a.*b$'", "'[a-c]+'", "'[^a]'", "'a|J'", "'^$'", "'line$'", "'k.b'",
              "'\\d'", "'\\w\\s'", "'[[:upper:]]'", "'^(?:a|b)*$'", "'a{2,3}'", "'\\.'", "'^.$'",
              "'[]a]'", "'x?'", "'\\\\'"],
    "similar": ["'a%'", "'(a|b)%'", "'_'", "'J(F|G)K'", "'[a-c]_?'", "'%\\%%'"],
    "interval": ["interval '1 day'", "interval '1 mon'", "interval '-1 year 2 days 03:04:05.6'",
                 "interval '-36:00:00'"],
    "few": ["0", "1", "2", "-1", "-2", "5", "3"],
    "places": ["0", "1", "2", "5"],
    "datefield": ["year", "month", "day", "dow", "isodow", "doy", "quarter", "week", "isoyear",
                  "epoch"],
    "timefield": ["year", "month", "hour", "minute", "second", "dow", "week"],
    "unit": ["'year'", "'month'", "'week'", "'day'", "'hour'", "'minute'", "'quarter'", "'second'"],
}  # fmt: skip
COLUMNS: dict[str, list[str]] = {
    "int4": ["a", "b", "a", "b", "id"],
    "int2": ["s"],
    "int8": ["l"],
    "numeric": ["n", "m", "n"],
    "float4": ["f"],
    "float8": ["d"],
    "text": ["t", "u"],
    "varchar": ["v"],
    "bpchar": ["c"],
    "bool": ["p", "q"],
    "date": ["day", "day2"],
    "timestamp": ["at", "at2"],
    "timestamptz": ["tz"],
    "uuid": ["g"],
    "bytea": ["y"],
    "intarray": ["ia"],
    "textarray": ["ta"],
    "any": ["a", "n", "d", "t", "c", "p", "day", "at", "g", "ia", "j", "x"],
}
_NUMBERS = ("int4", "int2", "int8", "numeric", "float4", "float8")
_ORDERED = (
    *_NUMBERS,
    "text",
    "bpchar",
    "date",
    "timestamp",
    "timestamptz",
    "uuid",
    "bytea",
    "bool",
)
TEMPLATES: dict[str, list[str]] = {
    "bool": [
        "{bool} and {bool}",
        "{bool} or {bool}",
        "not {bool}",
        "({bool}) is true",
        "({bool}) is not false",
        "({bool}) is unknown",
        "{any} is null",
        "{any} is not null",
        *(f"{{{k}}} {op} {{{k}}}" for k in _ORDERED for op in ("=", "<", ">=", "<>")),
        *(f"{{{k}}} is distinct from {{{k}}}" for k in _ORDERED),
        *(f"{{{k}}} is not distinct from {{{k}}}" for k in ("numeric", "date", "float8")),
        *(
            f"{{{k}}} in ({{{k}}}, {{{k}}})"
            for k in ("int4", "text", "numeric", "date", "float8", "bpchar", "uuid")
        ),
        *(
            f"{{{k}}} not in ({{={k}}}, {{={k}}})"
            for k in ("int4", "text", "numeric", "date", "float8", "bpchar")
        ),
        *(
            f"{{{k}}} between {{{k}}} and {{{k}}}"
            for k in ("int4", "numeric", "date", "timestamp", "text")
        ),
        "{int4} = {int8}",
        "{int2} < {int4}",
        "{float4} = {float8}",
        "{date} < {timestamp}",
        "{timestamp} = {date}",
        "{varchar} = {text}",
        "{text} like {=pattern}",
        "{text} not like {=pattern}",
        "{text} ilike {=pattern}",
        "{bpchar} like {=pattern}",
        "{text} like 'a!%%' escape '!'",
        "{text} ~ {=regex}",
        "{text} ~* {=regex}",
        "{text} !~ {=regex}",
        "{text} similar to {=similar}",
        "{bpchar} ~ {=regex}",
        "starts_with({text}, {text})",
        "case when {bool} then {bool} else {bool} end",
        "case {int4} when 1 then {bool} when 2 then {bool} end",
        "coalesce({bool}, {bool})",
        "{intarray} @> {intarray}",
        "{intarray} <@ {intarray}",
        "{intarray} && {intarray}",
        "{textarray} @> {textarray}",
        "{int4} = any({intarray})",
        "{int4} <> all({intarray})",
        "{int4} < any({intarray})",
        "{text} = any({textarray})",
        "{intarray} = {intarray}",
        "isfinite({date})",
        "isfinite({timestamp})",
        "{int4}::bool",
    ],
    "int4": ["({int4} + {int4})", "({int4} - {int4})", "({int4} * {int4})", "({int4} / {int4})",
             "({int4} % {int4})", "(- {int4})", "abs({int4})", "({int4} & {int4})",
             "({int4} # {int4})", "(~ {int4})", "({int2} + {int4})", "({int4} / {int2})",
             "mod({int4}, {int4})", "{numeric}::int", "{float8}::int", "{float4}::int",
             "{int8}::int", "{bool}::int", "length({text})", "length({bpchar})",
             "octet_length({text})", "strpos({text}, {text})", "position({text} in {text})",
             "ascii({text})", "({date} - {date})", "cardinality({intarray})",
             "array_length({intarray}, 1)", "case when {bool} then {int4} else {int4} end",
             "coalesce({int4}, {int4})", "nullif({int4}, {int4})",
             "greatest({int4}, {int4}, {int4})", "least({int4}, {int4})"],
    "int2": ["({int2} * {int2})", "({int2} / {int2})", "(- {int2})", "{int4}::int2",
             "{float8}::int2"],
    "int8": ["({int8} + {int4})", "({int8} * {int8})", "({int8} / {int8})", "({int8} % {int8})",
             "(- {int8})", "{float8}::int8", "{numeric}::int8", "{int4}::int8",
             "greatest({int8}, {int4})"],
    "numeric": ["({numeric} + {numeric})", "({numeric} - {numeric})", "({numeric} * {numeric})",
                "({numeric} % {numeric})", "(- {numeric})", "abs({numeric})", "ceil({numeric})",
                "floor({numeric})", "round({numeric})", "round({numeric}, {=places})",
                "trunc({numeric})", "trunc({numeric}, {=places})", "sign({numeric})",
                "{int4}::numeric", "{numeric}::numeric(6,1)", "extract({=datefield} from {date})",
                "extract({=timefield} from {timestamp})",
                "case when {bool} then {numeric} else {numeric} end",
                "coalesce({numeric}, {numeric})", "nullif({numeric}, {numeric})",
                "greatest({numeric}, {numeric})", "least({numeric}, {numeric})"],
    "float4": ["({float4} + {float4})", "({float4} * {float4})", "({float4} / {float4})",
               "(- {float4})", "{float8}::real", "{int4}::real", "{numeric}::real"],
    "float8": ["({float8} + {float8})", "({float8} - {float4})", "({float8} * {float8})",
               "({float8} / {float8})", "abs({float8})", "ceil({float8})", "floor({float8})",
               "round({float8})", "trunc({float8})", "sign({float8})", "sqrt({float8})",
               "{numeric}::float8", "{int4}::float8", "{int8}::float8", "{float4}::float8",
               "date_part('year', {date})", "date_part('dow', {date})",
               "greatest({float8}, {float8})", "coalesce({float8}, {float8})",
               "nullif({float8}, {float8})"],
    "text": ["lower({text})", "upper({text})", "substr({text}, {=few})",
             "substr({text}, {=few}, {=few})", "substring({text} from {=few} for {=few})",
             "left({text}, {=few})", "right({text}, {=few})", "trim({text})",
             "trim(both {text} from {text})", "ltrim({text}, {text})", "rtrim({text})",
             "replace({text}, {text}, {text})", "translate({text}, 'abc', 'xé')",
             "({text} || {text})", "md5({text})", "reverse({text})", "repeat({text}, {=few})",
             "lpad({text}, {=few})", "lpad({text}, {=few}, {=text})",
             "rpad({text}, {=few}, {=text})", "split_part({text}, {=text}, {=few})",
             "{bpchar}::text", "{varchar}::text", "{varchar}::varchar(2)::text",
             "case when {bool} then {text} else {text} end", "coalesce({text}, {text})",
             "nullif({text}, {text})", "greatest({text}, {text})"],
    "bpchar": ["{text}::char(3)", "{bpchar}::char(2)"],
    "date": ["({date} + {=few})", "({date} - {=few})", "({date} + {int4})", "{timestamp}::date",
             "make_date({int4}, {int4}, {int4})", "coalesce({date}, {date})",
             "greatest({date}, {date})", "case when {bool} then {date} else {date} end",
             "nullif({date}, {date})"],
    "timestamp": ["({timestamp} + {=interval})", "({timestamp} - {=interval})",
                  "({date} + {=interval})", "date_trunc({=unit}, {timestamp})", "{date}::timestamp",
                  "coalesce({timestamp}, {timestamp})", "least({timestamp}, {timestamp})"],
}  # fmt: skip
_HOLE = re.compile(r"\{(=?)(\w+)\}")


def expression(rng: random.Random, kind: str = "bool", depth: int = 3) -> str:
    """A random expression of a type; at depth 0 a column or a constant."""
    if depth <= 0 or kind not in TEMPLATES or (kind != "bool" and rng.random() < 0.35):
        return _leaf(rng, kind)
    template = rng.choice(TEMPLATES[kind])
    filled = _HOLE.sub(
        lambda hole: (
            _leaf(rng, hole[2], constant=True) if hole[1] else expression(rng, hole[2], depth - 1)
        ),
        template,
    )
    return f"({filled.replace('%%', '%')})"


def _leaf(rng: random.Random, kind: str, *, constant: bool = False) -> str:
    if kind in COLUMNS and not constant and (rng.random() < 0.75 or kind not in CONSTANTS):
        return rng.choice(COLUMNS[kind])
    return rng.choice(CONSTANTS[kind])


def rows(rng: random.Random, count: int) -> list[tuple[int, list[str | None]]]:
    """Random rows: the id, and the text of every other column in the table's order."""
    return [
        (k, [None if rng.random() < 0.12 else rng.choice(values) for values in VALUES.values()])
        for k in range(count)
    ]

"""The operators and functions that have a certain counterpart in Spark, one row each.

A row is ``name(argument types) result key flags``. The analysed text has every cast, so a call is
identified by the exact types of its arguments. Flags: ``c`` needs a text whose case is certain
(collation C), ``o`` one whose order is, ``u`` a UTF-8 server, ``k<n>`` constants from argument n
on. Anything that isn't listed is refused. The digits of numeric results have limits, which decide
whether Spark's decimals are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from waldelta.row_filter.typed_tree import FLOATS, INTEGERS, NUMERIC, Type, Typed
from waldelta.types.numeric import MAX_PRECISION

Digits: TypeAlias = tuple[int, int]

INTEGER_DIGITS: dict[str, Digits] = {"int2": (5, 0), "int4": (10, 0), "int8": (19, 0)}
COMPARISONS = {"=": "eq", "<>": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


@dataclass(frozen=True, slots=True)
class Signature:
    """One row: the result type, the key of the translation, and the requirements."""

    result: str
    key: str
    flags: frozenset[str] = frozenset()


_TABLE = """
length(text)                    int4        char_length
length(bpchar)                  int4        bpchar_length
char_length(text)               int4        char_length
char_length(bpchar)             int4        bpchar_length
character_length(text)          int4        char_length
character_length(bpchar)        int4        bpchar_length
octet_length(text)              int4        octet_length     u
octet_length(bpchar)            int4        octet_length     u
octet_length(bytea)             int4        octet_length
length(bytea)                   int4        octet_length
lower(text)                     text        lower            c
upper(text)                     text        upper            c
substr(text,int4)               text        substring        k1
substr(text,int4,int4)          text        substring        k1
substring(text,int4)            text        substring        k1
substring(text,int4,int4)       text        substring        k1
left(text,int4)                 text        left             k1
right(text,int4)                text        right            k1
strpos(text,text)               int4        strpos
position(text,text)             int4        strpos
btrim(text)                     text        btrim
btrim(text,text)                text        btrim
ltrim(text)                     text        ltrim
ltrim(text,text)                text        ltrim
rtrim(text)                     text        rtrim
rtrim(text,text)                text        rtrim
replace(text,text,text)         text        replace
translate(text,text,text)       text        translate        k1
starts_with(text,text)          bool        starts_with
^@(text,text)                   bool        starts_with
||(text,text)                   text        concat
md5(text)                       text        md5              u
reverse(text)                   text        reverse
repeat(text,int4)               text        repeat           k1
lpad(text,int4)                 text        lpad             k1
lpad(text,int4,text)            text        lpad             k1
rpad(text,int4)                 text        rpad             k1
rpad(text,int4,text)            text        rpad             k1
split_part(text,text,int4)      text        split_part       k1
ascii(text)                     int4        ascii            u
~~(text,text)                   bool        like             k1
!~~(text,text)                  bool        not_like         k1
~~*(text,text)                  bool        ilike            k1 c
!~~*(text,text)                 bool        not_ilike        k1 c
~(text,text)                    bool        regex            k1
!~(text,text)                   bool        not_regex        k1
~*(text,text)                   bool        iregex           k1 c
!~*(text,text)                  bool        not_iregex       k1 c
~~(bpchar,text)                 bool        like             k1
!~~(bpchar,text)                bool        not_like         k1
~~*(bpchar,text)                bool        ilike            k1 c
!~~*(bpchar,text)               bool        not_ilike        k1 c
~(bpchar,text)                  bool        regex            k1
!~(bpchar,text)                 bool        not_regex        k1
~*(bpchar,text)                 bool        iregex           k1 c
!~*(bpchar,text)                bool        not_iregex       k1 c
+(numeric,numeric)              numeric     numeric_add
-(numeric,numeric)              numeric     numeric_subtract
*(numeric,numeric)              numeric     numeric_multiply
%(numeric,numeric)              numeric     numeric_modulo
mod(numeric,numeric)            numeric     numeric_modulo
-(numeric)                      numeric     numeric_negative
+(numeric)                      numeric     numeric_same
abs(numeric)                    numeric     numeric_abs
@(numeric)                      numeric     numeric_abs
ceil(numeric)                   numeric     numeric_ceil
ceiling(numeric)                numeric     numeric_ceil
floor(numeric)                  numeric     numeric_floor
round(numeric)                  numeric     numeric_round
round(numeric,int4)             numeric     numeric_round    k1
trunc(numeric)                  numeric     numeric_trunc
trunc(numeric,int4)             numeric     numeric_trunc    k1
sign(numeric)                   numeric     numeric_sign
abs(float4)                     float4      float_abs
abs(float8)                     float8      float_abs
ceil(float8)                    float8      float_ceil
ceiling(float8)                 float8      float_ceil
floor(float8)                   float8      float_floor
round(float8)                   float8      float_round
trunc(float8)                   float8      float_trunc
sign(float8)                    float8      float_sign
sqrt(float8)                    float8      float_sqrt
|/(float8)                      float8      float_sqrt
+(date,int4)                    date        date_add
+(int4,date)                    date        int_add_date
-(date,int4)                    date        date_subtract
-(date,date)                    int4        date_difference
+(timestamp,interval)           timestamp   add_interval     k1
-(timestamp,interval)           timestamp   subtract_interval k1
+(date,interval)                timestamp   date_add_interval k1
-(date,interval)                timestamp   date_subtract_interval k1
make_date(int4,int4,int4)       date        make_date
isfinite(date)                  bool        is_finite
isfinite(timestamp)             bool        is_finite
isfinite(timestamptz)           bool        is_finite
date_trunc(text,timestamp)      timestamp   date_trunc
extract(text,date)              numeric     extract
extract(text,timestamp)         numeric     extract
date_part(text,date)            float8      date_part
date_part(text,timestamp)       float8      date_part
array_length(array,int4)        int4        array_length     k1
cardinality(array)              int4        cardinality
@>(array,array)                 bool        array_contains
<@(array,array)                 bool        array_contained
&&(array,array)                 bool        array_overlaps
=(array,array)                  bool        array_eq
<>(array,array)                 bool        array_ne
"""

# ``(from)::to``: from, to, key.
_CASTS = """
bool        int4        bool_to_int
int4        bool        int_to_bool
numeric     int2        numeric_to_int
numeric     int4        numeric_to_int
numeric     int8        numeric_to_int
numeric     float4      numeric_to_float
numeric     float8      numeric_to_float
float4      int2        float_to_int
float4      int4        float_to_int
float4      int8        float_to_int
float8      int2        float_to_int
float8      int4        float_to_int
float8      int8        float_to_int
float4      float8      widen
float8      float4      float_narrow
date        timestamp   date_to_timestamp
timestamp   date        timestamp_to_date
text        varchar     text_to_varchar
varchar     text        same
text        bpchar      text_to_bpchar
varchar     bpchar      text_to_bpchar
bpchar      text        bpchar_to_text
bpchar      varchar     bpchar_to_text
name        text        same
enum        text        same
enum        varchar     same
"""


def _same_kind() -> Iterator[tuple[str, tuple[str, ...], Signature]]:
    """Yields the comparisons, which differ only in their types."""
    kinds = [
        "bool",
        "text",
        "bpchar",
        "name",
        "uuid",
        "bytea",
        "numeric",
        "date",
        "timestamp",
        "timestamptz",
        "enum",
    ]
    pairs = [(kind, kind) for kind in kinds]
    pairs += [*product(INTEGERS, INTEGERS), *product(FLOATS, FLOATS)]
    pairs += [("date", "timestamp"), ("timestamp", "date")]
    for pair, (operator, key) in product(pairs, COMPARISONS.items()):
        ordered = key not in ("eq", "ne") and pair[0] in ("text", "bpchar", "name")
        if pair[0] == "enum" and key not in ("eq", "ne"):
            continue  # The order is that of the enum's labels.
        yield operator, pair, Signature("bool", key, frozenset("o" if ordered else ""))


def _arithmetic() -> Iterator[tuple[str, tuple[str, ...], Signature]]:
    """Yields arithmetic of integers and floats; mixed sizes have the larger type as result."""
    words = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
    for family, name in ((INTEGERS, "int"), (FLOATS, "float")):
        for (a, b), (operator, word) in product(product(family, family), words.items()):
            yield operator, (a, b), Signature(max(a, b), f"{name}_{word}")
        for a in family:
            yield "-", (a,), Signature(a, f"{name}_negative")
            yield "+", (a,), Signature(a, "same")
            yield "@", (a,), Signature(a, f"{name}_abs")
    for a in INTEGERS:
        yield "abs", (a,), Signature(a, "int_abs")
        yield "~", (a,), Signature(a, "bit_not")
        for name, key in {
            "%": "int_modulo",
            "mod": "int_modulo",
            "&": "bit_and",
            "|": "bit_or",
            "#": "bit_xor",
        }.items():
            yield name, (a, a), Signature(a, key)


def _read_signatures() -> Iterator[tuple[str, tuple[str, ...], Signature]]:
    for line in _TABLE.strip().splitlines():
        call, result, key, *flags = line.split()
        name, _, arguments = call.removesuffix(")").partition("(")
        yield name, tuple(arguments.split(",")), Signature(result, key, frozenset(flags))


def _casts() -> Iterator[tuple[tuple[str, str], str]]:
    for line in _CASTS.strip().splitlines():
        source, target, key = line.split()
        yield (source, target), key
    for a, b in product(INTEGERS, INTEGERS):
        yield (a, b), "widen" if a < b else "int_narrow" if a > b else "same"
    for a in INTEGERS:
        yield (a, "numeric"), "int_to_numeric"
        yield from (((a, b), "widen") for b in FLOATS)


SIGNATURES: dict[tuple[str, tuple[str, ...]], Signature] = {
    (name, arguments): signature
    for rows in (_same_kind(), _arithmetic(), _read_signatures())
    for name, arguments, signature in rows
}
CASTS: dict[tuple[str, str], str] = dict(_casts())
FUNCTION_NAMES = frozenset(name for name, _ in SIGNATURES)


class TooManyDigits(Exception):
    """The result may need more digits than Spark's decimal has."""


def common_digits(types: Sequence[Type]) -> Digits:
    """Returns the digits that values of all these types need."""
    digits = [t.digits or (1, 0) for t in types]
    return max(d[0] for d in digits), max(d[1] for d in digits)


def with_digits(typed: Typed) -> Typed:
    """Returns the node with the digits of its result; raises TooManyDigits.

    A comparison, or a remainder, uses the digits of both sides together.
    """
    arguments = [a.type.digits or (1, 0) for a in typed.arguments if a.type.name == "numeric"]
    if len(arguments) > 1:
        both = common_digits([a.type for a in typed.arguments if a.type.name == "numeric"])
        if sum(both) > MAX_PRECISION:
            raise TooManyDigits(f"numbers that need more than {MAX_PRECISION} digits together")
    if typed.type.name != "numeric" or typed.key not in _RESULT:
        return typed
    whole, scale = _RESULT[typed.key](arguments, _places(typed))
    if whole + scale + (typed.key == "numeric_multiply") > MAX_PRECISION:
        raise TooManyDigits(f"a result that may need more than {MAX_PRECISION} digits")
    return replace(typed, type=replace(NUMERIC, digits=(whole, scale)))


def _places(typed: Typed) -> int:
    """Returns the second argument of round() and trunc()."""
    argument = (
        typed.arguments[1].value
        if len(typed.arguments) > 1 and typed.arguments[1].type.name == "int4"
        else None
    )
    places = int(argument or 0)
    if places < 0:
        raise TooManyDigits(
            f"{typed.key.removeprefix('numeric_')} to the left of the decimal point"
        )
    return places


def _sum(a: list[Digits], _: int) -> Digits:
    return max(a[0][0], a[1][0]) + 1, max(a[0][1], a[1][1])


def _round_digits(a: list[Digits], places: int) -> Digits:
    return a[0][0] + 1, min(a[0][1], places)


_RESULT: dict[str, Callable[[list[Digits], int], Digits]] = {
    "numeric_add": _sum,
    "numeric_subtract": _sum,
    "numeric_multiply": lambda a, _: (a[0][0] + a[1][0], a[0][1] + a[1][1]),
    "numeric_modulo": lambda a, _: (min(a[0][0], a[1][0]), max(a[0][1], a[1][1])),
    "numeric_negative": lambda a, _: a[0],
    "numeric_same": lambda a, _: a[0],
    "numeric_abs": lambda a, _: a[0],
    "numeric_ceil": _round_digits,
    "numeric_floor": _round_digits,
    "numeric_round": _round_digits,
    "numeric_trunc": _round_digits,
    "numeric_sign": lambda _, __: (1, 0),
    "extract": lambda _, __: (20, 6),
}

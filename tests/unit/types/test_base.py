"""A type needs to say only how its texts are read; all else has a default."""

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg import sql

from waldelta.stages.repair.reconcile._checksum import source_text, target_texts
from waldelta.types import TargetType
from waldelta.types.array import Array
from waldelta.types.base import Marks, cast_or_raw

MARKS = Marks.drawn("ab")


@dataclass(frozen=True)
class Oid(TargetType):
    """Stands for a type that is added."""

    spark: str = "bigint"
    arrow: Any = field(default_factory=pa.int64)

    def read(self, text):
        return cast_or_raw(text, self.arrow)


def test_a_new_type_is_read_stored_and_compared():
    kind = Oid()
    typed, raw = kind.from_text(pa.array(["7", "x", None]))
    assert (typed.to_pylist(), raw.to_pylist()) == ([7, None, None], [None, "x", None])
    assert (kind.may_be_raw, kind.has_checksum) == (True, True)
    assert (kind.stored_sql("v"), kind.exact_sql("v"), kind.equal_sql("v")) == ("v",) * 3
    assert "concat(v)" in kind.copy_expressions(sql.SQL("v"))[0].as_string(None)


def test_a_new_type_has_checksums_alone_and_in_arrays():
    kind = Oid()
    array = Array("array<bigint>", pa.list_(kind.arrow), kind)
    columns = [(pa.array([7, None], kind.arrow), kind), (pa.array([[7], None], array.arrow), array)]
    raws = [pa.array([None, "x"]), None]
    expected = [f"7{MARKS.between}[7{MARKS.element}]", f"x{MARKS.between}{MARKS.null}"]
    assert target_texts(columns, raws, MARKS).to_pylist() == expected
    text = source_text([(sql.SQL("v"), kind)], MARKS, raw=True).as_string(None)
    assert "concat(v)" in text

"""A type is added by its class and its entry alone: all stages go by these."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg import sql

from tests.support.data.pg_types import Mask, array_of, domain_over
from waldelta.lake.data_file import FileStatistics, order_of
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.postgres import PgType
from waldelta.row_filter.typed_tree import column_type
from waldelta.stages.check.constraints.constraints import DeclaredType
from waldelta.stages.check.measure.profile import profiled_columns
from waldelta.stages.check.suite.row_kinds import limit_of
from waldelta.stages.repair.reconcile._checksum import source_text, target_texts
from waldelta.types import TargetType, stored_type
from waldelta.types import type_map as module
from waldelta.types.base import Marks, split_representable
from waldelta.types.type_map import key_type, target_type

OID, PRINTED, SPARK = 1083, "time without time zone", "time(6)"
PG = PgType(OID, -1, PRINTED, type_name="time")
MARKS = Marks.drawn("ab")


@dataclass(frozen=True)
class Time(TargetType):
    """What it doesn't say has a careful default."""

    is_fixed_size = True
    has_one_form = True

    spark: str = SPARK
    arrow: Any = field(default_factory=lambda: pa.time64("us"))

    def read(self, text):
        is_end_of_day = pc.starts_with(text, "24").fill_null(False)
        text, raw = split_representable(text, ~is_end_of_day.to_numpy(zero_copy_only=False))
        moments = pc.binary_join_element_wise("1970-01-01", text, " ").cast(pa.timestamp("us"))
        return moments.cast(self.arrow), raw


@dataclass(frozen=True)
class Reversed(Mask):
    """The ledger's name is its own, Spark's isn't."""

    @property
    def ledger_name(self):
        return "reversed"

    def read(self, text):
        return pc.utf8_reverse(text), None


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The entries of the type map, from which these two tables are made."""
    monkeypatch.setitem(module._STORED, "reversed", Reversed())
    cached = (target_type, stored_type)
    monkeypatch.setitem(module._SCALARS, OID, Time())
    monkeypatch.setitem(module._STORED, SPARK, Time())
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_it_is_found_from_the_source_and_from_the_ledger():
    assert target_type(PG) == target_type(domain_over(PG)) == stored_type(SPARK) == Time()
    assert target_type(array_of(PG)).spark == f"array<{SPARK}>"
    assert stored_type(f"array<{SPARK}>").element == Time()


def test_values_are_read_and_what_it_cannot_hold_is_raw():
    """PostgreSQL has a time that others lack."""
    typed, raw = target_type(PG).from_text(pa.array(["12:30:00", "24:00:00", None]))
    assert typed.to_pylist() == [time(12, 30), None, None]
    assert raw.to_pylist() == [None, "24:00:00", None]


def test_both_sides_of_reconcile_know_it():
    text = source_text([(sql.SQL("v"), target_type(PG))], MARKS, raw=True).as_string(None)
    assert "concat(v)" in text
    values = pa.array([time(12, 30)], pa.time64("us"))
    rows = target_texts([(values, stored_type(SPARK))], [None], MARKS)
    assert rows.to_pylist() == ["12:30:00.000000"]


def test_its_foreign_keys_are_judged():
    kind = key_type(OID, Time())
    assert kind.compared_with(kind) == "same"
    assert kind.compared_with(key_type(1082, stored_type("date"))) is None


def test_its_columns_are_profiled():
    column = ColumnState("v", OID, -1, PRINTED, SPARK, not_null=False)
    state = TableState(datetime.now(UTC), "r", "public.t", 1, "synced", columns=[column])
    assert profiled_columns(state) == [("v", False)]


def test_it_has_no_bounds_until_it_has_an_order():
    assert order_of(Time().arrow) is None
    statistics = FileStatistics(["v"])
    statistics.add(pa.table({"v": pa.array([time(1)], pa.time64("us"))}))
    assert '"minValues": {}' in statistics.text()


def test_filters_only_ask_whether_it_is_null():
    assert column_type(PRINTED, Time()).name == "opaque"


def test_nothing_judges_the_values_of_a_mask():
    """No filter, limit of the type, list of labels or foreign key of the source."""
    column = ColumnState("v", 1043, 9, "character varying(5)", "reversed", not_null=True)
    kind = column.stored_as
    assert (kind, column.spark_type) == (Reversed(), "string")
    assert column_type("text", kind).name == "opaque"
    assert limit_of(DeclaredType("v", column.type_name, 1043, 9), kind) is None
    assert key_type(1043, kind).compared_with(kind) is None

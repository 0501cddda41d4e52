"""Gate: what no gate can judge is refused before anything is merged."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.changes.stage.net_files import NetFiles
from waldelta.config.expectation_files import OwnExpectation
from waldelta.errors import ConfigError
from waldelta.lake import Lake, write_parquet
from waldelta.spark import InProcess
from waldelta.stages.check.gate.gate import judge
from waldelta.stages.check.gate.gate_files import TableGate
from waldelta.stages.check.gate.table_gate import (
    JudgedColumns,
    StagedRows,
    Verdict,
    _used_columns,
)
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.target_modes.modes import MODES
from waldelta.types import stored_type


def test_a_target_that_keeps_more_than_a_mirror_has_no_gate():
    """Its staged changes are states, several of one key maybe: nothing is judged in part."""
    plan = SimpleNamespace(state=SimpleNamespace(target_mode=MODES["history"]))
    with pytest.raises(ConfigError, match="only a target of mode mirror supports"):
        judge(None, None, plan, TableGate("public.t"), None)


SPARK = {"condition_parser": "spark"}
ARGUMENTS = [
    ("plain", {"column": "v", "min_value": 1, "mostly": 0.5}, ["v"]),
    ("none at all", {"min_value": 1}, None),
    ("in other letters, as Spark finds it", {"column": "V"}, ["v"]),
    ("a list", {"column_list": ["v", "note"]}, ["v", "note"]),
    ("a dict of lists",
     {"column": "v", "quantile_ranges": {"quantiles": [0.5], "value_ranges": [[None, 1]]}}, ["v"]),
    ("lists in a list", {"column_A": "v", "value_pairs_set": [["note", 1], ["y", None]]},
     ["v", "note"]),
    ("a parameter", {"column": "v", "min_value": {"$PARAMETER": "least"}}, ["v"]),
    ("one in backticks", {"column": "`a.b`"}, ["a.b"]),
    ("texts that are no conditions",
     {"column": "v", "value_set": ["note is null", "*"], "regex": "note("}, ["v"]),
    ("a row condition", {"column": "v", "row_condition": "note is null", **SPARK}, ["v", "note"]),
    ("a row condition on no column", {"column": "v", "row_condition": "1 = 1", **SPARK}, ["v"]),
    ("a row condition on all", {"column": "v", "row_condition": "hash(*) > 0", **SPARK}, None),
    ("one that isn't Spark SQL",
     {"column": "v", "row_condition": 'col("note").notNull()',
      "condition_parser": "great_expectations"}, None),
    ("one in parts",
     {"column": "v",
      "row_condition": {"type": "comparison", "column": {"name": "note"}, "operator": "==",
                        "parameter": "x y z"}}, ["v", "note"]),
    ("one in parts, of Spark SQL",
     {"column": "v", "row_condition": {"type": "pass_through", "pass_through_filter": "note > 1"}},
     ["v", "note"]),
    ("a condition and what it means", {"condition": "v > 0", "meaning": "the note (of it"}, ["v"]),
    ("a condition that isn't understood", {"condition": "v >"}, None),
    ("a query", {"unexpected_rows_query": "select id from {batch} where v is null"}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "expected"), [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS]
)
def test_columns_are_looked_for_in_arguments_of_any_depth(kwargs, expected):
    """By their names, and in conditions; what can't be told counts as any column."""
    assert _used_columns(["id", "v", "note", "a.b"], kwargs) == expected


NEVER = {"condition": "1 = 2", "meaning": "never"}
JUDGED = [
    ("by a column", "expect_column_values_to_be_between", {"column": "v", "min_value": 0}, [1, 4]),
    ("by no column", "expect_target_rows_to_satisfy", NEVER, [0, 1, 4]),
    ("of a share", "expect_column_values_to_not_be_null", {"column": "v", "mostly": 0.5}, [0]),
]


@pytest.mark.parametrize(
    ("kind", "kwargs", "failing"), [case[1:] for case in JUDGED], ids=[case[0] for case in JUDGED]
)
def test_rows_of_several_files_are_judged_by_their_numbers(tmp_path, kind, kwargs, failing):
    """Arrow counts those that meet the condition on the rows; Spark isn't asked."""
    folder = (tmp_path / "net").as_uri()
    for part, rows in enumerate([[("I", None), ("I", -1)], [("D", None)], [("D", -2), ("U", -3)]]):
        actions, values = zip(*rows, strict=True)
        table = pa.table({"action": actions, "c0": pa.array(values, pa.int32())})
        write_parquet(folder, table, part)
    item = OwnExpectation(type=kind, kwargs=kwargs, gate="stop")
    planned = PlannedExpectation(kind, kwargs, "critical", "own", kind)
    verdict = Verdict(item, planned)
    columns = JudgedColumns({"v": stored_type("int")}, [], has_metadata=False)
    files, runner = NetFiles.of(folder, Lake(tmp_path.as_uri())), InProcess(pytest.fail)
    rows = StagedRows(runner, files, columns, "public.t", "action in ('I', 'U')")
    rows.judge([verdict])
    assert verdict.failing.tolist() == failing
    assert verdict.outcome.unexpected_count == len(failing)
    assert verdict.is_met is ("mostly" in kwargs)

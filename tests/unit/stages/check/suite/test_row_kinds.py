"""What lengths, precisions and domains of the source's types become."""

import re
from dataclasses import replace

import pytest

from tests.support.data.suites import HELD, ID, state
from waldelta.row_filter import EnumType
from waldelta.stages.check.constraints.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.suite.expectation import SourceRules
from waldelta.stages.check.suite.kinds import plan_suite
from waldelta.stages.check.suite.row_kinds import ROWS_SATISFY, limit_of, printed_numeric
from waldelta.types import stored_type


def numeric(precision, scale):
    return ((precision << 16) | (scale & 0x7FF)) + 4


CASES = [
    ("varchar", DeclaredType("v", "character varying(5)", 1043, 9), "string",
     [("expect_column_value_lengths_to_be_between", {"max_value": 5})]),
    ("varchar without a length", DeclaredType("v", "character varying", 1043, -1), "string", []),
    ("char", DeclaredType("v", "character(5)", 1042, 9), "string",
     [("expect_column_value_lengths_to_be_between", {"max_value": 5})]),
    ("bits", DeclaredType("v", "bit(5)", 1560, 5), "string",
     [("expect_column_value_lengths_to_equal", {"value": 5})]),
    ("varying bits", DeclaredType("v", "bit varying(5)", 1562, 5), "string",
     [("expect_column_value_lengths_to_be_between", {"max_value": 5})]),
    ("a numeric that its decimal forces", DeclaredType("v", "numeric(9,2)", 1700, numeric(9, 2)),
     "decimal(9,2)", []),
    ("more digits behind the point than digits",
     DeclaredType("v", "numeric(3,5)", 1700, numeric(3, 5)), "decimal(5,5)",
     [(ROWS_SATISFY, "abs({}) < 0.01BD")]),
    ("a negative scale", DeclaredType("v", "numeric(3,-2)", 1700, numeric(3, -2)), "decimal(5,0)",
     [(ROWS_SATISFY, "{} % 100 = 0")]),
    ("a numeric as text", DeclaredType("v", "numeric(50,2)", 1700, numeric(50, 2)), "string",
     [("expect_column_values_to_match_regex", {"regex": "^(NaN|-?[0-9]{1,48}[.][0-9]{2})$"})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("declared", "spark_type", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_limits(declared, spark_type, expected):
    """Only what the target's type doesn't force."""
    kind = stored_type(spark_type)
    found = [limit for limit in [limit_of(declared, kind)] if limit is not None]
    assert [(of, arguments or condition) for of, arguments, condition in found] == expected


PRINTED = [
    ((5, 2), ["0.00", "-123.45", "NaN"], ["1234.00", "1.5", "1", "Infinity", "1.234"]),
    ((3, 0), ["0", "-999"], ["1000", "1.0"]),
    ((3, -2), ["0", "12300", "-100"], ["12345", "1234500"]),
    ((3, 5), ["0.00123", "-0.00999"], ["0.01000", "1.00000"]),
    ((2, 2), ["0.12"], ["1.12"]),
]


@pytest.mark.parametrize(
    ("kind", "held", "not_held"), PRINTED, ids=[str(case[0]) for case in PRINTED]
)
def test_printed_numeric(kind, held, not_held):
    """As PostgreSQL prints values of that precision and scale, and no others."""
    regex = printed_numeric(*kind)
    assert [text for text in held if not re.search(regex, text)] == []
    assert [text for text in not_held if re.search(regex, text)] == []


DOMAINS = [
    ("a comparison", "(VALUE > 0)", "integer", "int",
     "(`n` is null or not coalesce((not (`n` > 0)), false))"),
    ("of a domain over a domain", "((VALUE)::integer > 0)", "integer", "int",
     "(`n` is null or not coalesce((not (`n` > 0)), false))"),
    ("of texts", "((VALUE)::text <> 'VALUE'::text)", "character varying(9)", "string",
     "(`n` is null or not coalesce((not (`n` <> 'VALUE')), false))"),
    ("with a function that Spark lacks", "my_function(VALUE)", "integer", "int", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "base", "spark_type", "condition"),
    [c[1:] for c in DOMAINS],
    ids=[c[0] for c in DOMAINS],
)
def test_domain_constraints(expression, base, spark_type, condition):
    """As the table's own CHECK constraints, of each value that isn't null."""
    declared = DeclaredType("n", base, 0, -1, (CheckConstraint("d_check", expression),))
    plan = plan_suite(
        state([ID, ("n", "d", spark_type, False)]), HELD, None, SourceRules(declared=[declared])
    )
    found = [
        p.kwargs["condition"]
        for p in plan.expectations
        if p.meaning.startswith("domain constraint d_check of column n holds")
    ]
    assert found == ([condition] if condition else [])
    if condition is None:
        assert plan.omitted[0].startswith(
            "domain constraint d_check of column n: not checked, because of its part at"
        )


NULLS = [
    ("a domain's alone", ("n", "d", "int", False), [("warning", "not `n` is null")]),
    ("verbatim values are values", ("n", "d", "date", False),
     [("warning", "not (`n` is null and not coalesce(map_contains_key(_wd_raw, 'n'), false))")]),
    ("the column's own is critical, once", ("n", "d", "int", True), []),
]  # fmt: skip


@pytest.mark.parametrize(("column", "expected"), [c[1:] for c in NULLS], ids=[c[0] for c in NULLS])
def test_domains_that_are_not_null(column, expected):
    """A warning: a stored null can get around a domain, not around a column's NOT NULL."""
    declared = DeclaredType("n", "integer", 23, not_null=("d",))
    plan = plan_suite(state([ID, column]), HELD, None, SourceRules(declared=[declared]))
    found = [
        (p.severity, p.kwargs["condition"])
        for p in plan.expectations
        if "as its domain d says" in p.meaning
    ]
    assert found == expected


NOT_EMPTY = (CheckConstraint("c", "(VALUE <> ''::text)"),)
RENAMED = {
    "its length": ({"declared": [DeclaredType("v", "character varying(5)", 1043, 9)]}, "w fits"),
    "its domain": (
        {"declared": [DeclaredType("v", "text", 25, checks=NOT_EMPTY)]},
        "(`w` is null or not coalesce((not (`w` <> '')), false))",
    ),
    "its NOT NULL domain": (
        {"declared": [DeclaredType("v", "text", 25, not_null=("d",))]},
        "not `w` is null",
    ),
    "a CHECK constraint": (
        {"checks": [CheckConstraint("c", "((v)::text <> 'x'::text)")]},
        "not coalesce((not (`w` <> 'x')), false)",
    ),
    "its enum": ({"enums": {"v": EnumType("mood", ("good",))}}, "w has labels of"),
}


@pytest.mark.parametrize(("rules", "expected"), RENAMED.values(), ids=RENAMED)
def test_rules_of_a_column_with_another_name_in_the_lake(rules, expected):
    """Rules come by the source's name, and judge the target's column."""
    made = state([ID, ("w", "text", "string", False)])
    columns = [replace(c, source_name="v") if c.name == "w" else c for c in made.columns]
    plan = plan_suite(replace(made, columns=columns), HELD, None, SourceRules(**rules))
    assert not plan.omitted
    said = [(p.meaning, str(p.kwargs.get("condition"))) for p in plan.expectations]
    assert [text for text in said if expected in text[0] or expected == text[1]]

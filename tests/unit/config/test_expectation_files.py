"""The engineer's expectation files: what is refused, and which table a file belongs to."""

import json
import sys
from collections import Counter

import pytest

from tests.cases import cases
from waldelta.config import parse_text
from waldelta.config.expectation_files import (
    OwnExpectation,
    OwnSuite,
    OwnSuiteFile,
    read_own_suites,
)
from waldelta.errors import ConfigError
from waldelta.lake.ledger import TableState, now
from waldelta.stages.check.suite.kinds import plan_suite

GOOD = "expectations:\n  - {type: expect_column_to_exist, kwargs: {column: id}}\n"
MATCH = "expectations:\n  - {type: expect_column_values_to_match_regex"
REFUSED = [
    ("expectations: []", "expectations: too few entries: write 1 at least"),
    ("", "expectations: missing: add it"),
    ("[1]", "(top level): keys with values are needed"),
    ("expectations:\n  - {kwargs: {}}", "expectations[0].type: missing: add it"),
    ("expectations:\n  - {type: x, severty: warning}",
     "line 2: expectations[0].severty: unknown key: did you mean severity?"),
    ("expectation:\n  - {type: x}", "expectation: unknown key: did you mean expectations?"),
    ("expectations:\n  - {type: x, xyzzy: 1}",
     "expectations[0].xyzzy: unknown key: remove it; type, kwargs, severity, gate, notes are"),
    ("expectations:\n  - {type: x, severity: fatal}",
     "expectations[0].severity: one of critical, "),
    ("expectations:\n  - {type: x, gate: maybe}", "expectations[0].gate: one of warn, "),
    ("a: [", "is not valid YAML: line 1, column 5: expected the node content"),
    ("expectations: " + "[" * 700, "nested too deeply"),
    (f"{MATCH}, kwargs: {{column: v, regex: '(.*a){{12}}b'}}}}",
     "expectations[0].kwargs: regex '(.*a){12}b' may take exponential time"),
    (f"{MATCH}_list, kwargs: {{column: v, regex_list: [a, '(a+)+b']}}}}",
     "expectations[0].kwargs: regex_list '(a+)+b' may take exponential time"),
    *(
        (
            f"expectations:\n  - {{type: x, kwargs: {{{name}: {json.dumps(text)}}}}}",
            f"expectations[0].kwargs: {name} {shown} may take exponential time",
        )
        for name, text, shown in (
            ("condition", "v rlike '(.*a){12}b'", "'(.*a){12}b'"),
            ("condition", "not regexp_like(v, r'(\\w+\\s?)*$')", r"'(\\w+\\s?)*$'"),
            ("row_condition", "v REGEXP '(a+)' '+b'", "'(a+)+b'"),
            ("condition", r"v rlike '(\\d|\\w)+!'", r"'(\\d|\\w)+!'"),
            ("unexpected_rows_query", "select split(v, '(a+)+b') from {batch}", "'(a+)+b'"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[c[1] for c in REFUSED])
def test_refused(tmp_path, text, message):
    """A wrong file is named with the place in it."""
    (tmp_path / "public.t.yml").write_text(text)
    told = str(read_own_suites(tmp_path, ["public.t"]).refused["public.t"])
    assert message in told
    assert "public.t.yml" in told


PLAIN = (
    "v = '(a+)+b'",
    "v rlike '^[a-z]+(,[a-z]+)*$' and `(a+)+b` > 0 -- '(a+)+b'",
    "v rlike 'not closed",
)


@pytest.mark.parametrize("condition", PLAIN)
def test_a_condition_without_a_slow_pattern_is_taken(tmp_path, condition):
    text = f"{{type: x, kwargs: {{condition: {json.dumps(condition)}}}}}"
    (tmp_path / "public.t.yml").write_text(f"expectations: [{text}]")
    assert not read_own_suites(tmp_path, ["public.t"]).refused


def test_a_refused_file_is_of_its_table_alone(tmp_path):
    """The others have their suites; one that fits no table is told with what is wrong."""
    for name in ("a.yml", "b.yml", "x.yml"):
        (tmp_path / name).write_text("x: 1")
    (tmp_path / "c.yml").write_text(GOOD)
    found = read_own_suites(tmp_path, ["public.a", "public.b", "public.c", "public.d"])
    assert (set(found.refused), set(found.by_table)) == ({"public.a", "public.b"}, {"public.c"})
    (told,) = found.unused
    assert "x.yml fits no table that has been synced" in told
    assert "unknown key" in told


CALLED = [
    ("by its column", ["{type: x, kwargs: {column: a}}", "{type: x, kwargs: {column: b}}"],
     ["x on a", "x on b"]),
    ("by several", ["{type: x, kwargs: {column_list: [a, b], min_value: 1}}"], ["x on a, b"]),
    ("of the whole table", ["{type: x, kwargs: {min_value: 1}}"], ["x"]),
    ("by its place", ["{type: x}", "{type: x, kwargs: {value: 1}}", "{type: y}"],
     ["x (expectations[0])", "x (expectations[1])", "y"]),
    ("by its notes", ["{type: x, notes: n, kwargs: {column: a}}", "{type: x, notes: n}"],
     ["n (expectations[0])", "n (expectations[1])"]),
]  # fmt: skip


@cases("items, expected", CALLED)
def test_no_two_are_called_alike(tmp_path, items, expected):
    """Their results, and their rows on the pages, are told apart by what they are called."""
    (tmp_path / "t.yml").write_text(f"expectations: [{', '.join(items)}]")
    own = read_own_suites(tmp_path, ["public.t"]).by_table["public.t"]
    assert [own.meaning(number) for number in range(len(items))] == expected
    planned = [
        item
        for item in plan_suite(
            TableState(now(), "r", "public.t", 1, "synced"), [], own
        ).expectations
        if item.origin == "own"
    ]
    assert [item.meaning for item in planned] == expected


def test_a_thousand_are_named_by_one_pass_over_them(tmp_path):
    """Not by one pass for each, which took minutes."""
    kwargs = [{"column": f"c{number}"} for number in range(1_000)]
    items = [OwnExpectation(type="expect_column_to_exist", kwargs=each) for each in kwargs]
    own, calls = OwnSuiteFile(tmp_path, OwnSuite(expectations=items)), Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        names = {own.meaning(number) for number in range(len(items))}
    finally:
        sys.setprofile(None)
    assert len(names) == len(items)
    assert calls["call"] < 20 * len(items)


def test_as_many_as_a_file_has_room_for_are_read_with_their_lines(tmp_path, monkeypatch):
    """Only aliases make a file stand for too many values."""
    entry = GOOD.splitlines(keepends=True)[1]
    (tmp_path / "public.t.yml").write_text(f"{GOOD}\n{entry}{entry}")
    file = read_own_suites(tmp_path, ["public.t"]).by_table["public.t"]
    assert [file.place(n).rpartition("yml")[2] for n in range(3)] == [
        ":2: expectations[0]", ":4: expectations[1]", ":5: expectations[2]"
    ]  # fmt: skip
    monkeypatch.setattr(parse_text, "_MOST_VALUES", 100)
    (tmp_path / "public.t.yml").write_text(GOOD + entry * 199)
    file = read_own_suites(tmp_path, ["public.t"]).by_table["public.t"]
    assert file.lines == [*range(2, 202)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[a, null]", ["a"]),
        ("[a, ~, b, null]", ["a", "b"]),
        ("[null]", []),
        ("!!set {a, null}", ["a"]),
        ("[a, 'null']", ["a", "null"]),
        ("{$PARAMETER: labels}", {"$PARAMETER": "labels"}),
        ("null", None),
    ],
)
def test_a_null_is_no_value_of_a_set(tmp_path, given, expected):
    """Whoever judges by the file, before the merge or after it, gets the same set."""
    (tmp_path / "t.yml").write_text(
        f"expectations: [{{type: x, kwargs: {{column: a, value_set: {given}}}}}]"
    )
    (item,) = read_own_suites(tmp_path, ["public.t"]).by_table["public.t"].suite.expectations
    assert item.kwargs == {"column": "a", "value_set": expected}


def test_no_folder_no_suites(tmp_path):
    """A pipeline without own suites has no folder for them."""
    assert read_own_suites(None, ["public.t"]).by_table == {}
    with pytest.raises(ConfigError, match="there is no folder"):
        read_own_suites(tmp_path / "absent", ["public.t"])


@pytest.mark.parametrize(
    ("stem", "tables", "expected"),
    [
        ("public.t", ["public.t", "other.t"], "public.t"),
        ("t", ["public.t", "public.u"], "public.t"),
        ('public."A b"', ['public."A b"'], 'public."A b"'),
        ("public.A b", ['public."A b"'], 'public."A b"'),
    ],
)
def test_assign_suites(tmp_path, stem, tables, expected):
    """A file belongs to the table its name says, with the schema or without."""
    (tmp_path / f"{stem}.yml").write_text(GOOD)
    found = read_own_suites(tmp_path, tables)
    assert (list(found.by_table), found.unused) == ([expected], [])


@pytest.mark.parametrize(
    ("names", "refused", "told"),
    [
        (["t.yml"], {"a.t", "b.t"}, "name it schema.table.yml"),
        (["t.yml", "a.t.yml"], {"a.t", "b.t"}, "name it schema.table.yml"),
        (["u.yml", "a.u.yaml"], {"a.u"}, "both hold the suite of a.u: merge them"),
        (["u.yml", "u.yaml"], {"a.u"}, "both hold the suite of a.u: merge them"),
    ],
)
def test_ambiguous(tmp_path, names, refused, told):
    """What is ambiguous, a bare name or two files for a table, isn't judged; the rest is."""
    for name in (*names, "v.yml"):
        (tmp_path / name).write_text(GOOD)
    found = read_own_suites(tmp_path, ["a.t", "b.t", "a.u", "a.v"])
    assert (set(found.refused), set(found.by_table)) == (refused, {"a.v"})
    assert all(told in str(err) for err in found.refused.values())


@pytest.mark.parametrize("suffix", [".YML", ".Yaml", ".json"])
def test_a_file_that_ends_otherwise_is_refused(tmp_path, suffix):
    """It may hold a gate; and beside the file that is read it may be the one that was meant."""
    for name in (
        f"public.t{suffix}",
        f"public.gone{suffix}",
        f"u{suffix}",
        "u.yml",
        "README.md",
        "public.v.yml.orig",
    ):
        (tmp_path / name).write_text(GOOD)
    found = read_own_suites(tmp_path, ["public.t", "public.u", "public.v"])
    assert (set(found.refused), found.by_table) == ({"public.t", "public.u"}, {})
    expected = f"{tmp_path}/public.t{suffix}: isn't read: rename it public.t.yml"
    assert str(found.refused["public.t"]) == expected
    (told,) = found.unused
    assert "fits no table that has been synced" in told
    assert "rename it public.gone.yml" in told

"""Names of targets in the lake, by template."""

from __future__ import annotations

import pytest

from tests.support.pipelines import pipeline_file
from waldelta.config.target_names import TargetNames
from waldelta.pipeline.targets.move_target import name_problems

NAMES = [
    # template, target, its own, name in the lake
    ("{schema}.{table}", "public.orders", None, "public.orders"),
    ("{schema}.{table}", '"Odd"."a.b"', None, '"Odd"."a.b"'),
    ("{schema}_{table}", "public.orders", None, "public.public_orders"),
    ("raw.{schema}_{table}", "public.orders", None, "raw.public_orders"),
    ("raw.{table}", 'public."a.b"', None, 'raw."a.b"'),
    ("{schema}.{table}", 'public."say ""x"""', "{table}_1", 'public."say ""x""_1"'),
    ("raw.{table}", "public.orders", "Bestellungen", 'public."Bestellungen"'),
    ("raw.{table}", "public.orders", "{schema}.{table}", "public.orders"),
    ("größe_{schema}.t-{table}", "public.orders", None, '"größe_public"."t-orders"'),
]


@pytest.mark.parametrize(("template", "target", "own", "name"), NAMES)
def test_a_target_is_named_by_its_own_template_or_by_that_of_all(template, target, own, name):
    names = TargetNames(template, {} if own is None else {target: own})
    assert names.of(target) == name


REFUSED = [
    ("a.b.{table}", "with one dot between"),
    ("{schema}.", "with one dot between"),
    ("", "with one dot between"),
    ("{db}_{table}", "the only ones that are replaced"),
    ("{table!r}", "the only ones that are replaced"),
    ("{table:>9}", "the only ones that are replaced"),
    ("{table", "the only ones that are replaced"),
    ("{}{table}", "the only ones that are replaced"),
    ("../{table}", "with one dot between"),
    ("a/{table}", "has '/', which catalogs refuse"),
    ('"{table}"', """has '"', which catalogs refuse"""),
    ("a {table}\n", "which catalogs refuse"),
    ("lake.orders", "gives all tables the same name"),
]


@pytest.mark.parametrize(("template", "problem"), REFUSED)
def test_a_template_that_gives_no_names_is_refused(template, problem):
    with pytest.raises(ValueError, match=r"target\.names") as refused:
        pipeline_file("file:///l", "s", target={"root": "file:///l", "names": template})
    assert problem in str(refused.value)


PROBLEMS = [
    # template, own names, targets, names that are taken, which targets are refused and why
    ("raw.{table}", {}, ["a.t", "b.t", "b.u"], {}, {"b.t": "b.t and a.t would both be raw.t"}),
    ("{schema}_{table}", {}, ["a.b", "a.c"], {}, {}),
    ("{schema}.{table}", {"a.t": "u"}, ["a.t"], {"a.u": "a.u"}, {"a.t": "would both be a.u"}),
    ("{schema}.{table}", {}, ["a.t"], {"a.t": "a.t"}, {}),
    ("{schema}_{table}", {}, ["a." + 200 * "t"], {}, {}),
    ("x{schema}.{table}", {}, ["a." + 256 * "t"], {}, {"a." + 256 * "t": "256 bytes"}),
    ("{schema}_{table}", {}, [f'a."{80 * "ü"}"'], {}, {f'a."{80 * "ü"}"': "482 bytes"}),
]


@pytest.mark.parametrize(("template", "own", "targets", "taken", "refused"), PROBLEMS)
def test_names_that_a_lake_cant_have(template, own, targets, taken, refused):
    problems = name_problems(TargetNames(template, own), targets, taken)
    assert problems.keys() == refused.keys()
    assert all(text in problems[name] for name, text in refused.items())


COLUMNS = [
    ({"a": "x", "b": "X"}, {}, "Delta ignores case and can't keep column 'X'"),
    ({"a": "_wd_lsn"}, {}, "a column of waldelta's own"),
    ({"a": "_WD_Valid_From"}, {}, "a column of waldelta's own"),
    ({"a": "_change_type"}, {}, "a column of Delta's own"),
    ({"a": ""}, {}, "a column needs a name"),
    ({"a": "_wd_lsn"}, {"metadata_columns": False}, None),
    ({"a": "x", "A": "a"}, {}, None),
    ({"a": "b", "b": "a"}, {}, None),
]


@pytest.mark.parametrize(("columns", "settings", "problem"), COLUMNS)
def test_names_of_columns_that_delta_cant_have(columns, settings, problem):
    target = {"root": "file:///l", "tables": {"public.t": {"columns": columns}}, **settings}
    if problem is None:
        found = pipeline_file("file:///l", "s", target=target).target.columns_of("public.t")
        assert found == columns
        return
    with pytest.raises(ValueError, match="column") as refused:
        pipeline_file("file:///l", "s", target=target)
    assert problem in str(refused.value)

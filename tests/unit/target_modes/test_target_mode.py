"""Target modes: what the pipeline file and preflight say of them before anything is changed."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pydantic import ValidationError

from waldelta.config.pipeline_file import Target, TargetTable
from waldelta.errors import ModeRefused, StateError
from waldelta.pipeline.targets import TargetSource
from waldelta.postgres import PublishedTable, TableId
from waldelta.stages.setup.preflight.targets import PlannedTargets, judge_modes
from waldelta.target_modes.modes import MODES, named_mode
from waldelta.target_modes.target_mode import Feature


def published(name: str, oid: int, key: tuple[str, ...]) -> PublishedTable:
    table_id = TableId("public", name)
    return PublishedTable(
        table_id, oid, "r", "d", (), key, key, key, None, (), (oid,), frozenset({"insert"})
    )


@pytest.mark.parametrize(
    ("mode", "found"), [("mirror", 0), ("changelog", 0), ("soft_delete", 1), ("history", 1)],
)  # fmt: skip
def test_preflight_names_targets_without_the_key_that_their_mode_needs(mode, found):
    tables = {"public.a": published("a", 1, ()), "public.b": published("b", 2, ("id",))}
    feeds = {name: TargetSource(table.id, frozenset({table.oid})) for name, table in tables.items()}
    entries = dict.fromkeys(tables, TargetTable.model_validate({"mode": mode}))
    findings = [str(finding) for finding in judge_modes(entries, PlannedTargets(tables, feeds))]
    assert len(findings) == found
    assert all("target.tables.public.a.mode: public.a has no key" in text for text in findings)


def test_a_mode_of_another_version_is_named():
    with pytest.raises(StateError, match="mode 'scd2', which this version"):
        named_mode("scd2")


REFUSED = {
    "no such mode": ({"tables": {"public.t": {"mode": "scd2"}}},
                     "one of mirror, soft_delete, history, changelog is needed"),
    "gathered leaves": ({"tables": {"public.t": {"mode": "history", "partition_root": True}}},
                        "publish the table via its root"),
    "no copy": ({"tables": {"public.t": {"mode": "history", "copy": False}}},
                "mode history and copy: false exclude each other"),
    "no columns of ours":
     ({"metadata_columns": False, "tables": {"public.t": {"mode": "changelog"}}},
      "metadata_columns: true for public.t"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_file_refuses(name):
    keys, says = REFUSED[name]
    with pytest.raises(ValidationError, match=says):
        Target.model_validate({"root": "file:///lake"} | keys)


def test_the_file_takes_what_a_later_mode_supports(monkeypatch):
    """Neither the file nor its rules know the modes by name."""
    mode = replace(MODES["soft_delete"], name="archive", features={Feature.PARTITION_ROOT})
    monkeypatch.setitem(MODES, "archive", mode)
    table = {"mode": "archive", "partition_root": True}
    assert TargetTable.model_validate(table).mode == "archive"
    with pytest.raises(ValidationError, match="mode archive and copy: false exclude each other"):
        TargetTable.model_validate(table | {"copy": False})
    with pytest.raises(ValidationError, match="history, changelog, archive is needed"):
        TargetTable.model_validate({"mode": "scd2"})


@pytest.mark.parametrize("feature", Feature)
def test_a_mode_that_keeps_rows_has_no_feature_that_would_overwrite_them(feature):
    kept = MODES["history"]
    if feature.value in {"gates", "mend"}:
        with pytest.raises(ValueError, match=f"mode history keeps rows .*: no {feature.value}"):
            replace(kept, features={feature})
    else:
        assert replace(kept, features={feature}).supports(feature)


@pytest.mark.parametrize(
    ("mode", "condition", "added"),
    [
        ("mirror", "true", ()),
        ("soft_delete", "not _wd_deleted", ("_wd_deleted", "_wd_deleted_at")),
        ("history", "_wd_valid_to_lsn is null",
         ("_wd_valid_from", "_wd_valid_to", "_wd_valid_from_lsn", "_wd_valid_to_lsn")),
    ],
)  # fmt: skip
def test_live_rows_lack_only_columns_of_their_own_mode(mode, condition, added):
    """A mirror without metadata columns may have a column of the source that is called _wd_op."""
    columns = MODES[mode].source_columns(["id", "a {b}", "_wd_op", *added], ["id"])
    query = MODES[mode].live_query(columns, ["id"])
    assert query == f"select `id`, `a {{{{b}}}}`, `_wd_op` from {{rows}} where {condition}"


def test_the_first_copy_has_values_for_columns_of_the_mode():
    for mode in MODES.values():
        first = mode.first_values(7, datetime(2026, 1, 31, tzinfo=UTC))
        assert first.keys() <= mode.columns({"id": "int"}).keys(), mode


def test_only_a_mirror_gets_another_mode():
    named_mode(None).check_change("public.t", MODES["history"])
    MODES["history"].check_change("public.t", MODES["history"])
    with pytest.raises(
        ModeRefused,
        match=r"public\.t has mode history in the lake, and the pipeline file says changelog",
    ):
        MODES["history"].check_change("public.t", MODES["changelog"])


def test_a_changelog_tells_the_key_before_by_its_columns():
    """Quoted, whatever they are called."""
    assert (
        MODES["changelog"].columns({"a b": "int", "c": "string"})["_wd_before"]
        == "struct<`a b`: int, `c`: string>"
    )
    assert "_wd_before" not in MODES["changelog"].columns({})


@pytest.mark.parametrize(
    ("before", "key", "problem"),
    [
        (["b", "order no"], ["order no", "b"], None),
        ([], [], None),
        ([], ["id"], "changed from none to id"),
        (["id"], [], "changed from id to none"),
        (["a", "b"], ["a", "c"], "changed from a, b to a, c"),
    ],
)
def test_a_changelog_has_the_key_of_its_table(before, key, problem):
    """Its column for the key before a change has the fields that the first copy gave it."""
    of = [("_wd_before", pa.struct([(name, pa.int32()) for name in before]))] if before else []
    schema = pa.schema([("id", pa.int32()), *of])
    refused = pytest.raises(ModeRefused, match=problem) if problem else nullcontext()
    with refused:
        MODES["changelog"].check_stored_key("public.t", schema, key)
    MODES["history"].check_stored_key("public.t", schema, key)


def test_a_changelog_renames_and_widens_the_key_before_a_change():
    key = {"No.": ("order no", "decimal(12,2)"), "b": ("b", "int")}
    assert MODES["changelog"].evolved_columns(key)[-1] == (
        "case when _wd_before is not null then named_struct('No.', cast(_wd_before.`order no` as"
        " decimal(12,2)), 'b', cast(_wd_before.`b` as int)) end as _wd_before"
    )
    assert "_wd_before" not in "".join(MODES["changelog"].evolved_columns({}))

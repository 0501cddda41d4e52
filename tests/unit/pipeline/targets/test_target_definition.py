"""What external writers change in a target's definition is named with the commit that did it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from tests.support.pipelines import job_of, pipeline_file
from waldelta.errors import NeedsSync, TargetAltered
from waldelta.lake import DeltaLog
from waldelta.lake.ledger import ColumnState, TableState, now
from waldelta.pipeline.targets import check_columns, merge_error
from waldelta.pipeline.targets.target_definition import check_new_columns, foreign_columns, upgrade

ROWS = pa.table({"id": pa.array([1], pa.int32()), "note": ["a"], "amount": [1.5]})
OTHER = {"userName": "alice", "engineInfo": "Other/1", "timestamp": 0}
BY = r"by version 2 \({} by alice, Other/1, 1970-01-01 00:00:00\+0000\)"


@pytest.fixture
def job(lake):
    """Of a target with two commits, without waldelta's own columns."""
    made = job_of(pipeline_file(lake, "shop", target={"root": lake, "metadata_columns": False}))
    for mode in ("error", "append"):
        write_deltalake(made.lake.target("public.t").uri, ROWS, mode=mode)
    return made


@pytest.fixture
def state():
    kinds = {"id": "int", "note": "string", "amount": "double"}
    columns = [ColumnState(name, 25, -1, "text", kind, False) for name, kind in kinds.items()]
    return TableState(
        now(), "run", "public.t", 1, "synced", columns=columns, key_columns=["id"], version=0
    )


def commit(job, operation, schema=None, *, configuration=None, protocol=None, info=OTHER):
    """Writes a commit of an external writer that changes the definition."""
    target = job.lake.target("public.t")
    table = DeltaTable(target.uri)
    folder = Path(urlsplit(target.uri).path) / "_delta_log"
    lines = [{"commitInfo": {"operation": operation, **info}}]
    if schema is not None or configuration is not None:
        lines.append(
            {
                "metaData": {"id": "t", "format": {"provider": "parquet", "options": {}},
                             "schemaString": (schema or table.schema()).to_json(),
                             "partitionColumns": [], "configuration": configuration or {}},
            }
        )  # fmt: skip
    if protocol is not None:
        lines.append({"protocol": protocol})
    entry = folder / f"{table.version() + 1:020d}.json"
    entry.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def schema_of(**kinds):
    return Schema.from_arrow(pa.schema([pa.field(name, kind) for name, kind in kinds.items()]))


INT, TEXT, FLOAT = pa.int32(), pa.string(), pa.float64()
COLUMNS = {
    "dropped": ({"id": INT, "note": TEXT}, r"column `amount` is missing "),
    "renamed": ({"id": INT, "text": TEXT, "amount": FLOAT}, r"column `note` is missing "),
    "in capitals": ({"id": INT, "NOTE": TEXT, "amount": FLOAT}, r"column `note` is missing "),
    "of another type": (
        {"id": INT, "note": INT, "amount": FLOAT},
        r"column `note` has the type int instead of string ",
    ),
    "two": ({"id": INT}, r"column `note` is missing, column `amount` is missing "),
}


@pytest.mark.parametrize(("columns", "what"), COLUMNS.values(), ids=COLUMNS)
def test_a_changed_column_is_named_with_its_commit(job, state, columns, what):
    """Also when a later external commit changed something else."""
    check_columns(job, state)
    commit(job, "CHANGE", schema_of(**columns))
    commit(job, "SET TBLPROPERTIES", schema_of(**columns), configuration={"own": "x"})
    with pytest.raises(TargetAltered, match=what + BY.format("CHANGE")) as caught:
        check_columns(job, state)
    assert re.search("RESTORE to the version before it.*shop_initial_sync", str(caught.value))


def test_a_further_column_is_no_concern_until_the_source_has_one_of_that_name(job, state):
    commit(job, "ADD COLUMNS", schema_of(id=INT, note=TEXT, amount=FLOAT, Extra=TEXT))
    check_columns(job, state)
    check_new_columns(job, state, ["other"])
    with pytest.raises(
        TargetAltered, match=r"column `Extra` was added.* rename or drop it"
    ) as told:
        check_new_columns(job, state, ["other", "extra"])
    assert re.search(BY.format("ADD COLUMNS"), str(told.value))


METADATA = {
    "_wd_lsn": pa.int64(),
    "_wd_commit_ts": pa.timestamp("us", "UTC"),
    "_wd_raw": pa.map_(TEXT, TEXT),
}
OWN = {"id": INT, "note": TEXT, "amount": FLOAT, **METADATA}
KEY = {"_wd_before": pa.struct([pa.field("id", INT)])}
OF_MODES = {
    "mirror": {},
    "soft_delete": {"_wd_deleted": pa.bool_(), "_wd_deleted_at": pa.timestamp("us", "UTC")},
    "changelog": {"_wd_op": TEXT, "_wd_seq": pa.int64(), "_wd_xid": pa.int64(),
                  "_wd_unchanged": pa.list_(TEXT), **KEY},
}  # fmt: skip


@pytest.mark.parametrize("mode", OF_MODES)
def test_waldeltas_own_columns_are_checked_too(lake, job, state, mode):
    job = job_of(pipeline_file(lake, "shop"))
    state = replace(state, mode=mode)
    columns = OWN | OF_MODES[mode]
    commit(job, "CREATE", schema_of(**columns))
    check_columns(job, state)
    assert foreign_columns(job, state) == []
    for name in (*METADATA, *OF_MODES[mode]):
        commit(job, "DROP", schema_of(**{key: columns[key] for key in columns if key != name}))
        with pytest.raises(
            TargetAltered, match=rf"altered its target: column `{name}` is missing by version \d+ "
        ):
            check_columns(job, state)
        commit(job, "CREATE", schema_of(**columns))


def test_a_target_that_never_had_metadata_columns_is_copied_again(lake, job, state):
    """No external writer is blamed for what the pipeline file said."""
    with_metadata = job_of(pipeline_file(lake, "shop"))
    with pytest.raises(NeedsSync, match=r"target\.metadata_columns is true now"):
        check_columns(with_metadata, state)


def test_a_killed_run_is_no_external_writer(job, state):
    """Its commit has columns that the ledger doesn't have, and may never have."""
    own = {"userMetadata": json.dumps({"waldelta": {"verb": "reshape", "run_id": "run 1"}})}
    commit(job, "ADD COLUMNS", schema_of(id=INT, note=TEXT, amount=FLOAT, new=TEXT), info=own)
    check_columns(job, state)
    with pytest.raises(NeedsSync, match="run 1 changed its target's columns, and ended before"):
        check_new_columns(job, state, ["new"])
    commit(job, "WRITE", schema_of(id=INT, text=TEXT, amount=FLOAT), info=own)
    with pytest.raises(NeedsSync, match="run 1 changed its target's columns, and ended before"):
        check_columns(job, state)


def test_the_log_is_read_once_and_no_further_than_needed(job, state, monkeypatch):
    """In an object store, each of thousands of commits is a request."""
    for _ in range(5):
        commit(job, "SET TBLPROPERTIES", configuration={"own": "x"})
    commit(job, "DROP COLUMNS", schema_of(id=INT))
    versions, read = [], DeltaLog.read
    monkeypatch.setattr(
        DeltaLog, "read", lambda log, version: versions.append(version) or read(log, version)
    )
    with pytest.raises(TargetAltered, match=r"`note` is missing, column `amount` is missing by"):
        check_columns(job, state)
    assert versions == [7, 6]


REFUSALS = {
    "DELTA_VIOLATE_CONSTRAINT_WITH_VALUES": ({"configuration": {"delta.constraints.few": "id < 3"}},
     r"CHECK constraint `few` was added {}: drop it \(ALTER TABLE .* DROP CONSTRAINT `few`\)"),
    "DELTA_CANNOT_MODIFY_APPEND_ONLY": ({"configuration": {"delta.appendOnly": "true"}},
     r"delta.appendOnly was set {}: unset it .*'delta.appendOnly' = 'false'"),
    "DELTA_NOT_NULL_CONSTRAINT_VIOLATED": (
        {
            "schema": Schema.from_arrow(
                pa.schema([pa.field("id", INT, False), pa.field("extra", TEXT, False)])
            )
        },
        r"column `extra` is NOT NULL {}: change that column",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSALS)
def test_what_a_commit_violates_is_named_without_values(job, state, code):
    """Delta's own message has the row's."""
    told = RuntimeError(f"[{code}] CHECK constraint few (id < 3) violated by row: - id : 4711")
    change, expected = REFUSALS[code]
    commit(job, "CHANGE", **change)
    named = merge_error(job, state, told)
    assert type(named) is TargetAltered
    assert not named.retryable
    assert re.search(expected.format(BY.format("CHANGE")), str(named)), named
    assert code in str(named)
    assert "4711" not in str(named)


def test_another_failure_stays_what_it_is(job, state):
    commit(job, "CHANGE", configuration={"delta.appendOnly": "true"})
    assert type(merge_error(job, state, RuntimeError("boom"))) is not TargetAltered


def test_a_feature_that_nobody_knows_here_is_named(job):
    """Not as missing files of the log, which nobody could restore."""
    features = {"readerFeatures": ["notYet"], "writerFeatures": ["notYet", "other"]}
    target, err = job.lake.target("public.t"), ValueError("Feature 'notYet' isn't supported")
    assert upgrade(target, "public.t", 0, err) is None
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    commit(job, "UPGRADE PROTOCOL", protocol=protocol)
    named = upgrade(target, "public.t", 0, err)
    assert re.search(r"version 2 \(UPGRADE PROTOCOL by .*\) requires notYet, other, ", str(named))
    assert re.search("DROP FEATURE.*move the target's folder away", str(named))

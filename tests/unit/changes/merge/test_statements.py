"""The statements of the merge, as text: every name quoted, every column set."""

import json
from collections import Counter

from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.merge.merge import KeylessTarget, rewrite_statement
from waldelta.changes.merge.statements import CommitTag, NetColumns, net_statement, of_leaves
from waldelta.types import stored_type
from waldelta.types.hstore import Hstore
from waldelta.types.numeric import NumericAsText
from waldelta.types.text import Text

NUMBERING = ColumnNumbering(column_count=3, key=(1,), toastable=(2,))
NAMES = ("v", "the `key`", "it's")
PLAIN, WITH_METADATA = (NetColumns(NAMES, NUMBERING, metadata) for metadata in (False, True))


def test_merge_statement():
    """The row is found by its base key, takes its new one, and keeps unchanged TOAST."""
    assert (
        net_statement("delta.`file:///l/s/t`", "src", PLAIN)
        == "merge into delta.`file:///l/s/t` as t\n"
        "using src as s\n"
        "on t.`the ``key``` = s.b0\n"
        "when matched and s.action in ('delete', 'purge') then delete\n"
        "when matched then update set t.`v` = s.c0, t.`the ``key``` = s.c1, "
        "t.`it's` = case when s.u2 then t.`it's` else s.c2 end\n"
        "when not matched and s.action in ('insert', 'upsert') then\n"
        "  insert (`v`, `the ``key```, `it's`) values (s.c0, s.c1, s.c2)"
    )


def test_truncated_leaves():
    """Rows of a truncated leaf go unless a change brings them back."""
    clause = f"{of_leaves('t', (7, 9))} then delete"
    merged = net_statement("delta.`u`", "src", PLAIN, others=[clause, "t.v then delete"])
    assert merged.endswith(
        "\nwhen not matched by source and t._wd_relid in (7, 9) then delete"
        "\nwhen not matched by source and t.v then delete"
    )
    columns = [("_wd_relid", stored_type("bigint"))]
    leaves = KeylessTarget(columns, metadata_columns=False, truncated=(7, 9))
    rewritten = rewrite_statement("delta.`u`", "src", leaves)
    assert (
        "select `_wd_relid` as v0 from delta.`u` as o where not coalesce(o._wd_relid in (7, 9),"
        " false))" in rewritten
    )


def test_merge_statement_keeps_verbatim_values_of_unchanged_columns():
    """_wd_raw is what came now, and what stood there for the columns that stay."""
    statement = net_statement("delta.`u`", "src", WITH_METADATA)
    assert "map_filter(t._wd_raw, (k, v) -> (k = 'it\\'s' and s.u2))" in statement
    assert statement.endswith("values (s.c0, s.c1, s.c2, s.lsn, s.commit_ts, s.raw)")


def test_insert_statement():
    """Without a key rows are added; after a TRUNCATE they replace what was there."""
    added = net_statement("delta.`u`", "src", NetColumns(NAMES, ColumnNumbering(3, ()), False))
    assert added.startswith(
        "insert into delta.`u` (`v`, `the ``key```, `it's`)\nselect c0, c1, c2\nfrom src"
    )
    replaced = net_statement("delta.`u`", "src", WITH_METADATA, overwrite=True)
    assert replaced.startswith("insert overwrite delta.`u`")
    assert "_wd_raw" in replaced
    assert all(text.endswith("where action in ('insert', 'upsert')") for text in (added, replaced))


def test_rewrite_statement():
    """Without a key, columns are compared by position, and maps by their entries."""
    columns = [("the `row", Text()), ("n", NumericAsText()), ("h", Hstore())]
    table = KeylessTarget(columns, metadata_columns=True, others=["it`s gone"])
    statement = rewrite_statement("delta.`u`", "src", table)
    assert statement.startswith(
        "insert overwrite delta.`u` (`the ``row`, `n`, `h`, `_wd_lsn`, `_wd_commit_ts`, `_wd_raw`,"
        " `it``s gone`)\nwith plain as (select `the ``row` as v0, `n` as v1, `h` as v2,"
        " `_wd_lsn` as lsn, `_wd_commit_ts` as commit_ts, `_wd_raw` as raw, `it``s gone` as x0 from"
        " delta.`u`),"
    )
    for column, raw in (("v2", "raw"), ("b2", "base_raw")):
        entries = f"case when size({raw}) > 0 then array_sort(map_entries({raw})) end"
        assert (
            f"array_sort(map_entries({column})), {entries})))) forms as alike, exact" in statement
        )
    assert statement.endswith(
        "select r.c0, r.c1, r.c2, r.lsn, r.commit_ts, r.raw, null\nfrom src as r\nwhere r.action ="
        " 'insert'"
    )
    assert "else t.x0 end" in statement
    plain = rewrite_statement("delta.`u`", "src", KeylessTarget(columns, metadata_columns=False))
    assert "raw" not in plain


def test_counts_of_a_commit():
    """They are stored as they are, whatever counted them."""
    tag = CommitTag("app", 1, counts=Counter(upsert=2))
    assert json.loads(tag.metadata)["waldelta"]["counts"] == {"upsert": 2}

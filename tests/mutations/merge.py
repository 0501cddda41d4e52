"""Merge: net changes become one commit of the target."""

from tests.mutations.mutation import Mutation

_STATEMENTS = "unit/changes/merge/test_statements.py"
_ROWS = "unit/changes/merge/test_rows.py"
_FILE = "unit/changes/merge/test_file_merge.py"
_BOTH = "unit/changes/merge/test_merge_without_spark.py"
_BOUNDS = "unit/changes/merge/test_compare_bounds.py"
_FEED = "unit/changes/merge/test_merge_change_data.py"
_APPLY = "unit/stages/apply/test_apply.py"

MUTATIONS = (
    Mutation(
        "changes/merge/statements.py",
        "in ('{ACTION_DELETE}', '{ACTION_PURGE}') then delete",
        "in ('{ACTION_DELETE}') then delete",
        "Spark keeps rows at keys that a row of the batch has left.",
        (_STATEMENTS,),
    ),
    Mutation(
        "changes/merge/statements.py",
        "case when s.u{i} then t.{quote(names[i])} else s.c{i} end",
        "case when s.u{i} then s.c{i} else t.{quote(names[i])} end",
        "Spark replaces unchanged TOASTed values by NULL, and keeps changed ones.",
        (_STATEMENTS,),
    ),
    Mutation(
        "changes/merge/statements.py",
        "where action in ('{ACTION_INSERT}', '{ACTION_UPSERT}')",
        "",
        "Deleted rows are inserted after a TRUNCATE.",
        (_STATEMENTS,),
    ),
    Mutation(
        "changes/merge/statements.py",
        'return f"{alias}.{RELID} in (',
        'return f"{alias}.{RELID} not in (',
        "A TRUNCATE of one leaf removes the rows of the others.",
        (_STATEMENTS,),
    ),
    Mutation(
        "changes/merge/rows.py",
        "combines &= np.asarray(before.is_valid())",
        "combines &= np.asarray(before.is_null())",
        "A row loses the raw text of an unchanged value.",
        (_BOTH, _ROWS),
    ),
    Mutation(
        "changes/merge/rows.py",
        "has_action(self.net, ACTION_DELETE, ACTION_PURGE)",
        "has_action(self.net, ACTION_DELETE)",
        "Arrow keeps rows at keys that a row of the batch has left.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/rows.py",
        "changed = self._updated & ~self._keeps(source)",
        "changed = self._updated",
        "Arrow replaces unchanged TOASTed values by NULL.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/rows.py",
        "has_action(net, ACTION_INSERT, ACTION_UPSERT) & ~matched",
        "~matched",
        "An UPDATE of a row that the target lacks adds a row.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        ">= tag.batch:",
        "> tag.batch:",
        "A batch that was applied before a crash is applied again.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "target_rows.files if tasks.changes.is_truncated else []",
        "[]",
        "Rows from before a TRUNCATE stay, because new rows are only added.",
        (_BOTH,),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "sum(len(of_file) for _, of_file in rewritten)",
        "True",
        "New rows of a small target are lost where no file is rewritten.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "Counter(parts).items() if count > 1}",
        "Counter(parts).items() if count > 99}",
        "Each run adds a file to a small target.",
        (_FILE,),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "        fence.verify()\n    except Exception:",
        "    except Exception:",
        "A run commits files to a target that another run has taken over.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "count != net_changes(tag.counts)",
        "count > net_changes(tag.counts)",
        "Net changes whose staged file is gone are committed as complete.",
        (_FILE,),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        'self.removed.append(by_path[row["removed"]])',
        "pass",
        "A rewritten file stays beside its replacement, and its rows are doubled.",
        (_FILE,),
    ),
    Mutation(
        "changes/merge/compare.py",
        'np.searchsorted(of_values, of_most, side="right")',
        "np.searchsorted(of_values, of_most)",
        "A file isn't searched for the greatest of its keys.",
        (_BOUNDS,),
    ),
    Mutation(
        "lake/data_file.py",
        "return pc.add(most, _WITHIN_A_MILLISECOND)",
        "return most",
        "A file isn't searched for a time within the millisecond of its bound.",
        (_BOUNDS,),
    ),
    Mutation(
        "changes/merge/compare.py",
        "spans | np.asarray(least.is_null()) | np.asarray(most.is_null())",
        "spans",
        "A file without bounds isn't searched.",
        (_BOUNDS,),
    ),
    Mutation(
        "changes/merge/merge.py",
        "    fence.verify()\n    again = tenacity",
        "    again = tenacity",
        "Spark merges into a target that another run has copied again.",
        (_APPLY,),
    ),
    Mutation(
        "lake/storage.py",
        "            os.fsync(handle)\n",
        "            pass\n",
        "A power cut undoes commits on which later effects are built.",
        (
            "integration/land/test_power_cut.py::test_nothing_is_built_on_what_a_power_cut_could_take_back",
        ),
    ),
    Mutation(
        "lake/commit_files.py",
        "os.link(draft, path)",
        "os.replace(draft, path)",
        "A commit is no compare-and-swap: it lands on a version that nobody read.",
        (_BOTH, _FILE),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "shows = table.shows_changes and not changes.is_truncated",
        "shows = False",
        "The change data feed shows all rows of rewritten files as deleted and inserted again.",
        (_FEED,),
    ),
    Mutation(
        "changes/merge/file_merge.py",
        "shows = table.shows_changes and not changes.is_truncated",
        "shows = table.shows_changes",
        "The change data feed doesn't show the rows that a TRUNCATE removed.",
        (_FEED,),
    ),
)

"""Targets: which relations a target gets its changes from, and which copy of it is current."""

from tests.mutations.mutation import Mutation

_SOURCES = "unit/pipeline/targets/test_target_sources.py"
_LIFECYCLE = "unit/pipeline/targets/test_lifecycle.py"
_REPAIR_ROWS = "unit/stages/repair/test_repair_rows.py"
_WATERMARKS = "unit/pipeline/targets/test_watermarks.py"

MUTATIONS = (
    Mutation(
        "pipeline/targets/target_sources.py",
        'if root in r.ancestors and r.relkind != "p"',
        "if root in r.ancestors",
        "A partitioned table is merged as one of its own leaves.",
        (_SOURCES,),
    ),
    Mutation(
        "pipeline/targets/target_sources.py",
        "        key = (RELID, *key)\n",
        "        pass\n",
        "Rows with one key in two leaves are one row of a merged target.",
        (_SOURCES,),
    ),
    Mutation(
        "pipeline/targets/target_sources.py",
        "if relation.oid not in merged_oids and name not in with_source",
        "if name not in with_source",
        "A merged leaf is a target of its own, too.",
        (_SOURCES,),
    ),
    Mutation(
        "pipeline/targets/target_sources.py",
        "if there is not None and relation.oid not in there.ancestors:",
        "if there is not None and relation.oid in there.ancestors:",
        "A target gets rows of a partition of another table.",
        (_SOURCES,),
    ),
    Mutation(
        "pipeline/drift/record_drift.py",
        "set(state.relation_ids)) - elsewhere)",
        "set(state.relation_ids)))",
        "A merged target keeps a leaf that another target replicates now.",
        (_SOURCES,),
    ),
    Mutation(
        "changes/decode/decode.py",
        'pc.is_in(events[f"c{plan.relid}"], value_set=truncated)',
        'pc.is_valid(events[f"c{plan.relid}"])',
        "A TRUNCATE of one leaf makes UPDATEs of the others no-ops.",
        ("unit/changes/decode/test_decode.py",),
    ),
    Mutation(
        "pipeline/targets/lifecycle.py",
        "return state.root_id == mapping.root_id  #",
        "return state.root_id is not None  #",
        "A target follows another partitioned table without a new copy.",
        (_LIFECYCLE,),
    ),
    Mutation(
        "pipeline/targets/lifecycle.py",
        """\
    if state.status == REMOVED:
        return TableLifecycle(table_name, RequiredAction.FIRST, state, _RETURNED)
    if state.status == SYNCED and is_same_source:
""",
        """\
    if state.status in (REMOVED, SYNCED) and is_same_source:
""",
        "A table that was away from its publications gets changes without a new copy.",
        (_LIFECYCLE,),
    ),
    Mutation(
        "pipeline/targets/lifecycle.py",
        "(SYNCED, NEEDS_SYNC) or (previous is not None and previous.copied)",
        "(SYNCED, NEEDS_SYNC)",
        "A resync that failed counts as an initial copy.",
        (_LIFECYCLE,),
    ),
    Mutation(
        "pipeline/targets/watermarks.py",
        '{state.table_name}:{state.generation}"',
        '{state.table_name}"',
        "A new copy inherits the watermark of the one before, and lacks changes.",
        (_WATERMARKS,),
    ),
    Mutation(
        "pipeline/targets/watermarks.py",
        "(present.generation, present.status) != (state.generation, state.status)",
        "present.status != state.status",
        "A run applies changes to a copy that another run made meanwhile.",
        (_WATERMARKS,),
    ),
    Mutation(
        "lake/ledger/records.py",
        "if target.table_name == state.table_name and target.generation == state.generation",
        "if target.table_name == state.table_name",
        "A new copy takes the watermark of a cut that has the copy before.",
        (_WATERMARKS,),
    ),
    Mutation(
        "lake/ledger/ledger.py",
        "max((state.generation for state in rows), default=0) + 1",
        "max((state.generation for state in rows if state.status == SYNCED), default=0) + 1",
        "A new copy gets the generation of a failed one.",
        ("unit/lake/ledger/test_ledger.py",),
    ),
    Mutation(
        "stages/sync/sync.py",
        "return self.state is None or (self.state.generation, self.state.status) != (",
        "return self.state is None or (self.state.generation, SYNCED) != (",
        "A table is copied again although another run's copy has ended.",
        ("unit/stages/sync/test_sync.py",),
    ),
    Mutation(
        "stages/repair/_repair_rows.py",
        "places = pa.array(first[~np.isin(codes[first], of_read)])",
        "places = pa.array(first)",
        "A repair deletes the rows that it has read again.",
        (_REPAIR_ROWS,),
    ),
    Mutation(
        "changes/merge/compare.py",
        "differ = unlike | (upserts & (matched == 0))",
        "differ = upserts & (matched == 0)",
        "A repair leaves rows that differ from the source's.",
        ("unit/changes/merge/test_compare.py",),
    ),
    Mutation(
        "changes/merge/mode_target.py",
        "stays = (at >= 0) | ~has_action(versions, ACTION_UPDATE)",
        "stays = np.ones(len(versions), np.bool_)",
        "An update of a row that a history lacks becomes a state.",
        ("unit/changes/merge/test_mode_target.py",),
    ),
    Mutation(
        "changes/merge/mode_target.py",
        'columns["action"] = pc.if_else(seen, ACTION_UPDATE, ACTION_DELETE)',
        'columns["action"] = pc.if_else(seen, ACTION_UPDATE, ACTION_UPDATE)',
        "A state that began where it ends stays in a history.",
        ("unit/changes/merge/test_mode_target.py",),
    ),
    Mutation(
        "changes/merge/rows.py",
        "ends = (self.of_row < 0) & ending.are_current(self.held)",
        "ends = (self.of_row < 0) & False",
        "A TRUNCATE leaves the rows open that no other change names.",
        ("unit/changes/merge/test_merge_without_spark.py",),
    ),
    Mutation(
        "target_modes/changelog.py",
        "order = np.lexsort((leaves, seq, lsn, codes))",
        "order = np.lexsort((seq, lsn, codes))",
        "A row that takes a key which another left in one change is no current row.",
        ("unit/changes/merge/test_mode_target.py",),
    ),
)

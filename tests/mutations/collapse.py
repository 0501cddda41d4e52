"""Collapse: what many changes of a row amount to."""

from tests.mutations.mutation import Mutation

_COLLAPSE = "unit/changes/decode/test_collapse.py"
_KEYLESS = "unit/changes/decode/test_collapse_keyless.py"
_STATES = "unit/changes/decode/test_row_states.py"

MUTATIONS = (
    Mutation(
        "changes/decode/collapse.py",
        "order = np.lexsort((event, key))",
        "order = np.lexsort((key, event))",
        "Changes of one key are no longer next to each other.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "np.where(previous < 0, Root.BASE, Root.MISSING)",
        "Root.BASE",
        "An UPDATE of a row that the batch deleted changes the target's row.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "follow(np.where(flags & (chains.parent >= 0), chains.parent, index))",
        "follow(np.where(chains.parent >= 0, chains.parent, index))",
        "A TOASTed value is the oldest of the batch instead of the newest.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "is_kept_key = np.isin(chains.destination[fresh], kept_keys)",
        "is_kept_key = np.zeros(len(fresh), np.bool_)",
        "A new row replaces the row that has just moved away from its key.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "deletes = dead_roots[~np.isin(chains.source[dead_roots], fresh_keys)]",
        "deletes = dead_roots",
        "A row that is deleted and inserted again has two net changes.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "values = pc.add(values, pa.scalar(0.0, values.type))",
        "values = pc.add(values, pa.scalar(-0.0, values.type))",
        "0 and -0 are two keys.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "pa.array(codes * cardinality + part)",
        "pa.array(codes + part)",
        "Rows with different keys of several columns are one row.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "encoded.indices.fill_null(len(encoded.dictionary))",
        "encoded.indices.fill_null(0)",
        "NULL equals the first value of its column.",
        (_KEYLESS,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        """\
    if not isinstance(base_is_empty, bool):
        base_is_empty = base_is_empty[stream_order(events)]
""",
        "",
        "Which leaf was truncated is read of another event, where tasks return events unordered.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "not (position[1:] > position[:-1]).all()",
        "not (position[1:] > position[:-1]).any()",
        "Events that are partly in order stay as they are.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "while len(nowhere := self._nowhere()):",
        "if len(nowhere := self._nowhere()):",
        "A missing row that moves twice takes another row's place.",
        (_COLLAPSE,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "order = np.lexsort((is_opening, event, row))",
        "order = np.lexsort((~is_opening, event, row))",
        "An UPDATE that changes nothing takes the duplicate that it produces.",
        (_KEYLESS,),
    ),
    Mutation(
        "changes/decode/collapse.py",
        "matched = matched[np.lexsort((matched, level[matched], row[matched]))]",
        "matched = matched[np.lexsort((matched, row[matched]))]",
        "A change takes a duplicate that another change has taken.",
        (_KEYLESS,),
    ),
    Mutation(
        "changes/decode/row_states.py",
        "(chains.origin != Root.MISSING) & (end_lsn != lsn)",
        "(chains.origin != Root.MISSING)",
        "A state that no other transaction saw becomes a row of the history.",
        (_STATES,),
    ),
    Mutation(
        "changes/decode/row_states.py",
        "    at[order] = np.maximum.accumulate(at[order])\n",
        "",
        "A clock that is set back makes a state end before it begins.",
        (_STATES,),
    ),
)

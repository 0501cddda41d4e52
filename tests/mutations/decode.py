"""Decode: which messages count, in which order, and which values they bring."""

from tests.mutations.mutation import Mutation

_DECODE = "unit/changes/decode/test_decode.py"
_SKIPPED = "unit/changes/decode/test_decode_skipped_messages.py"
_TRANSACTIONS = "unit/pgoutput/test_transactions.py"
_ORDER = "unit/lake/changelog/test_row_messages_in_order.py"
_ROWS = "unit/pgoutput/test_rows.py"
_ENVELOPE = "unit/pgoutput/test_envelope.py"

MUTATIONS = (
    Mutation(
        "pgoutput/transactions.py",
        'self._table[_FIRST, numbers], key[rows], side="right")',
        'self._table[_FIRST, numbers], key[rows], side="left")',
        "The first message of a segment belongs to the segment before it.",
        (_TRANSACTIONS,),
    ),
    Mutation(
        "pgoutput/transactions.py",
        """\
        self._plain(landmark.batch, landmark.seq)
        for part in parts or ():
            decided = replace(part, commit_lsn=control.lsn, commit_ts_us=control.at_us)
            self._emit(decided, landmark.batch)
""",
        """\
        for part in parts or ():
            decided = replace(part, commit_lsn=control.lsn, commit_ts_us=control.at_us)
            self._emit(decided, landmark.batch)
        self._plain(landmark.batch, landmark.seq)
""",
        "A streamed transaction comes before plain ones that committed earlier.",
        (_TRANSACTIONS,),
    ),
    Mutation(
        "pgoutput/transactions.py",
        'kind == "A" and control.subxid != control.xid:',
        'kind == "A" and control.subxid == control.xid:',
        "A rollback to a savepoint discards the whole transaction, and a rollback only itself.",
        (_TRANSACTIONS,),
    ),
    Mutation(
        "pgoutput/transactions.py",
        'elif kind in ("c", "K"):',
        "elif kind:",
        "A kind that no rule knows counts as a commit.",
        (_TRANSACTIONS,),
    ),
    Mutation(
        "pgoutput/transactions.py",
        "if decided_in > self.after:",
        "if segment.batch > self.after:",
        "A transaction that was prepared in an earlier batch is lost when it commits.",
        (_TRANSACTIONS,),
    ),
    Mutation(
        "pgoutput/transactions.py",
        "place[(key >= first) & (key <= last)] = -1",
        "place[(key >= first) & (key < last)] = -1",
        "The last message of a skipped range is applied.",
        (_SKIPPED,),
    ),
    Mutation(
        "lake/changelog/row_messages.py",
        "xid8 < self.xmax",
        "xid8 <= self.xmax",
        "The first transaction after a copy's snapshot is never applied.",
        (_DECODE,),
    ),
    Mutation(
        "lake/changelog/row_messages.py",
        "visible &= ~np.isin(",
        "visible |= np.isin(",
        "Transactions that ran during a copy count as copied.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/decode.py",
        "is_new &= (place > at) | (relation_id != truncated)",
        "is_new &= place > at",
        "A TRUNCATE of one leaf discards earlier changes of the others.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/decode.py",
        "unchanged = rows.unchanged[at]",
        "unchanged = rows.unchanged[at] & False",
        "NULL replaces an unchanged TOASTed value.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/decode.py",
        "unchanged = (rows.op == UPDATE) & (i in plan.numbering.stopped)",
        "unchanged = (rows.op == UPDATE) & False",
        "NULL replaces the last value of a dropped column that stays by decision.",
        ("integration/apply/test_consent.py",),
    ),
    Mutation(
        "changes/decode/decode.py",
        "unchanged = rows.unchanged[k] & rows.old.has_tuple",
        "unchanged = rows.unchanged[k] & ~rows.old.has_tuple",
        "An unchanged TOASTed key isn't read from the old row.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/decode.py",
        "pc.if_else(pa.array(is_unchanged), new, rows.old[k])",
        "pc.if_else(pa.array(~rows.old.has_tuple), rows.old[k], new)",
        "An UPDATE of a key changes the row that has the new key.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/relation_versions.py",
        "            return within & ~is_streamed\n",
        "            return within\n",
        "Columns of one transaction describe rows of a streamed one.",
        (_DECODE,),
    ),
    Mutation(
        "changes/decode/relation_versions.py",
        "streamed.pop((batch, xid8), ())",
        "streamed.pop((batch, None), ())",
        "Columns that a streamed transaction made known are unknown after its commit.",
        (_DECODE,),
    ),
    Mutation(
        "pgoutput/rows.py",
        "return np.asarray(self._kinds[k] == _UNCHANGED)",
        "return np.asarray(self._kinds[k] == _NULL)",
        "NULL counts as unchanged, and unchanged as sent.",
        (_ROWS,),
    ),
    Mutation(
        "pgoutput/rows.py",
        "bad |= at != self.messages.end[rows]",
        "bad |= at > self.messages.end[rows]",
        "A message with bytes after its last value is accepted.",
        (_ROWS,),
    ),
    Mutation(
        "pgoutput/envelope.py",
        "distance = (xid - (self.next_xid8 & (whole - 1)) + half) % whole - half",
        "distance = (xid - (self.next_xid8 & (whole - 1))) % whole",
        "Earlier transactions get an epoch that is still to come.",
        (_ENVELOPE,),
    ),
    Mutation(
        "pgoutput/envelope.py",
        "xid[aborts] = u4(messages.bytes, messages.start[aborts] + 1)",
        "xid[aborts] = u4(messages.bytes, messages.start[aborts] + 5)",
        "A rollback to a savepoint is filed under the subtransaction.",
        (_ENVELOPE,),
    ),
    Mutation(
        "lake/changelog/row_messages.py",
        "places[oid] = max(place, places.get(oid, place))",
        "places[oid] = min(place, places.get(oid, place))",
        "Rows between two TRUNCATEs stay.",
        (_ORDER,),
    ),
    Mutation(
        "lake/changelog/row_messages.py",
        """if place < 0 or row["xid8"] < since_xid""",
        """if row["xid8"] < since_xid""",
        "A TRUNCATE that was rolled back empties the target.",
        (_ORDER,),
    ),
)

"""Land and consume: what is read from the slot is durable and verified before the slot moves."""

from tests.mutations.mutation import Mutation

_DECODE = "unit/changes/decode/test_decode.py"
_BATCH_FILE = "unit/lake/changelog/test_batch_file.py"
_CHANGE_LOG = "unit/lake/changelog/test_change_log.py"
_APPLY = "unit/stages/apply/test_apply.py"
_CONCURRENT = "unit/stages/apply/test_concurrent.py"
_ACKNOWLEDGE = "integration/slot/test_acknowledge.py"
_DRAIN = "integration/land/test_drain.py"

MUTATIONS = (
    Mutation("slot/acknowledge.py", "    if not agree(connection, consumed, landed):",
             "    if not agree(connection, consumed, consumed):",
             "The slot moves past changes that haven't landed.",
             (f"{_ACKNOWLEDGE}::test_a_mismatch_keeps_a_copy_of_the_slot",)),
    Mutation("slot/acknowledge.py",
             '    ledger.append(replace(move, at=now(), event="intent", compared_after=by_get))\n',
             "", "A run that dies after the move leaves no record of it.",
             (f"{_ACKNOWLEDGE}::test_a_batch_whose_comparison_was_lost_is_told",)),
    Mutation("slot/acknowledge.py", "if confirmed_lsn(connection, move.slot).value >= move.lsn:",
             "if confirmed_lsn(connection, move.slot).value > move.lsn:",
             "Another run's move to the same position counts as lost changes.",
             (f"{_ACKNOWLEDGE}::test_a_run_that_wakes_up_behind_another_consumes_nothing",)),
    Mutation("slot/acknowledge.py", "    if confirmed.value < lsn:",
             "    if confirmed.value > lsn:",
             "A slot that didn't move isn't noticed, and WAL accumulates.",
             (f"{_ACKNOWLEDGE}::test_a_slot_that_does_not_move_is_an_error",)),
    Mutation("slot/acknowledge.py", "        if verified.begins > position:\n",
             "        if verified.begins < position:\n",
             "A slot behind WAL of an earlier request is a mismatch.",
             (f"{_DRAIN}::test_publications_that_were_changed_after_a_run_are_no_mismatch",)),
    Mutation("stages/land/drain.py", "        if not is_cut_off:\n", "        if True:\n",
             "The slot is acknowledged too far: up to the end of a window that was read in part.",
             (f"{_DRAIN}::test_bites_are_bounded_and_nothing_falls_between_them",)),
    Mutation("stages/land/drain.py", "    check_read()\n    try:", "    try:",
             "A batch lands that lacks what another run consumed meanwhile.",
             ("integration/slot/test_slot_taken.py::test_a_move_during_a_run_is_a_gap",)),
    Mutation("lake/changelog/batch_file.py", "if table.committed(self.app_id) < batch:",
             "if table.committed(self.app_id) <= batch:", "A batch lands twice.", (_BATCH_FILE,)),
    Mutation("lake/changelog/change_log.py", "sizes.get(batch, 0) != messages",
             "sizes.get(batch, 0) > messages", "A lost batch isn't noticed.", (_CHANGE_LOG,)),
    Mutation("lake/changelog/change_log.py", "if max(after_batch, pruned) < batch",
             "if after_batch < batch", "Batches that maintenance dropped count as lost.",
             (_CHANGE_LOG,)),
    Mutation("lake/changelog/change_log.py", "is None or xid8 >= snapshot.xmin:",
             "is None or xid8 >= snapshot.xmax:",
             "Transactions that ran during a copy are never applied to it.", (_CHANGE_LOG,)),
    Mutation("lake/changelog/batch_file.py",
             "pc.invert(pc.is_in(streamed, value_set=self._voided)),", "pc.is_valid(streamed),",
             "Rows of a savepoint that was rolled back are a mismatch with the slot.", (_DECODE,)),
    Mutation("lake/changelog/batch_file.py",
             "end_lsn_sum=self._lsn_sum + sum(streamed.values()),", "end_lsn_sum=self._lsn_sum,",
             "Ends of streamed transactions are a mismatch with the slot.", (_DECODE,)),
    Mutation("stages/apply/_apply_batches.py", "if ends and all(", "if ends and any(",
             "Batches are collapsed together that exceed the memory.", (_APPLY, _CONCURRENT)),
    Mutation("stages/apply/apply_targets.py", "if newest.batch <= cut.batch:",
             "if newest.batch < cut.batch:", "A cut is published twice.", (_APPLY,)),
)  # fmt: skip

"""After a kill, a restored or promoted server, or a lost slot nothing is lost."""

from tests.mutations.mutation import Mutation

_RECOVERY = "unit/slot/test_recovery.py"
_DURABLE = "unit/slot/test_recovery.py"
_FAILOVER = "unit/slot/test_standby.py"
_INTERVAL = "unit/stages/repair/replay/test_interval.py"
_LEDGER = "unit/lake/ledger/test_ledger.py"
_RESTORED = "integration/slot/test_restored.py"
_DRAIN = "integration/land/test_drain.py"

MUTATIONS = (
    Mutation("slot/recovery.py", "if 0 < change_log.end_lsn(first) <= confirmed.value:",
             "if change_log.end_lsn(first) <= confirmed.value:",
             "An empty batch hides the batches before it from the comparison.", (_RECOVERY,)),
    Mutation("slot/recovery.py", "    messages = one.messages + behind.messages",
             "    messages = one.messages", "One comparison after a restart exceeds a read window.",
             (_RECOVERY,)),
    Mutation("slot/recovery.py", "return one.request == behind.request and is_small",
             "return is_small", "Batches of two read requests are compared by the first one.",
             (_RECOVERY,)),
    Mutation("slot/recovery.py", "max(told_from, confirmed.value)", "told_from",
             "What the slot has returned already is compared again.", (_RECOVERY,)),
    Mutation("slot/recovery.py", "    if confirmed > furthest:", "    if confirmed < furthest:",
             "Changes that another program consumed aren't missed.",
             (f"{_DRAIN}::test_a_slot_moved_by_somebody_else_is_a_named_gap",)),
    Mutation("slot/recovery.py", "if log_end <= server.flush_lsn:",
             "if log_end <= server.flush_lsn + (1 << 62):",
             "A server restored to an earlier state isn't noticed.", (_RESTORED,)),
    Mutation("slot/recovery.py", "if (last := change_log.last_batch() or 0) < intended:",
             "if (last := change_log.last_batch() or 0) < 0:",
             "A change log that lacks a consumed batch isn't noticed.",
             (f"{_DRAIN}::test_a_change_log_that_lost_batches_is_a_named_gap",)),
    Mutation("slot/recovery.py",
             "early_lsns = [move.lsn for move in moves if move.at < checkpoint - MOVING]",
             "early_lsns = [move.lsn for move in moves if move.at < checkpoint]",
             "A move during the checkpoint counts as written to disk.", (_DURABLE,)),
    Mutation("slot/recovery.py", "any(lsn <= furthest for lsn in since)",
             "any(lsn < furthest for lsn in since)",
             "A slot that went back to its last position counts as durable there.", (_DURABLE,)),
    Mutation("slot/standby.py", "if log_end > switchpoint:", "if log_end < switchpoint:",
             "A lake that is ahead of a promoted standby is accepted.", (_FAILOVER,)),
    Mutation("slot/standby.py", "state.snapshot_lsn > switchpoint.value",
             "state.snapshot_lsn < switchpoint.value",
             "A copy that includes lost changes is kept after a failover.", (_FAILOVER,)),
    Mutation("slot/standby.py",
             "{older.timeline: Lsn(newer.lsn) for older, newer in pairwise(chain)}",
             "{older.timeline: Lsn(older.lsn) for older, newer in pairwise(chain)}",
             "A second promotion is compared with the wrong end of the first timeline.",
             (_FAILOVER,)),
    Mutation("lake/ledger/ledger.py", "for m in promotions if m.timeline > move.timeline",
             "for m in promotions if m.timeline >= move.timeline",
             "Moves on the current timeline count only up to its beginning.", (_FAILOVER, _LEDGER)),
    Mutation("lake/ledger/ledger.py", "if batch is None or batch.messages is None:",
             "if batch is None or batch.messages is not None:",
             "A repeated move replaces the number of messages that had landed.", (_LEDGER,)),
    Mutation("stages/repair/replay/interval.py", "begin < end and (until > start",
             "begin <= end and (until > start",
             "A replay of an interval includes the run of the next one.", (_INTERVAL,)),
    Mutation("stages/repair/replay/interval.py", "if start < landed <= end]",
             "if start <= landed < end]", "A replay lacks the last batch of its runs.",
             (_INTERVAL,)),
    Mutation("stages/repair/replay/interval.py", "for move in promotions if run.at < move.at",
             "for move in promotions if run.at > move.at",
             "Runs after a failover end where the old timeline did.", (_FAILOVER, _INTERVAL)),
    Mutation("pipeline/reported_commits.py",
             "at >= since and versions.get(table_name, -1) >= version",
             "at >= since and versions.get(table_name, -1) > version",
             "A commit that a later run reported is reported again.",
             ("unit/pipeline/test_reported_commits.py",)),
)  # fmt: skip

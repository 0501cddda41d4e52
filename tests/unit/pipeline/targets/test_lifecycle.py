"""A table's standing: every state of its life against what is published, as one table of cases."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.pipelines import job_of, pipeline_file
from waldelta.lake.ledger import SlotMove, TableState
from waldelta.pipeline import Job
from waldelta.pipeline.targets import (
    RequiredAction,
    TableLifecycle,
    TargetSource,
    read_lifecycles,
    record_removed,
)
from waldelta.pipeline.targets.lifecycle import (
    LatestState,
    copied_by_runs,
    latest_by_name,
    lifecycle_of,
)
from waldelta.postgres import TableId

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIRST, APPLY, COPY = RequiredAction.FIRST, RequiredAction.APPLY, RequiredAction.COPY
BROKEN, REMOVED, WAIT = RequiredAction.BROKEN, RequiredAction.REMOVED, RequiredAction.WAIT


def plain(**oids: int) -> dict[str, TargetSource]:
    return {
        f"public.{name}": TargetSource(TableId("public", name), frozenset([oid]))
        for name, oid in oids.items()
    }


HERE = plain(t=7)
ELSEWHERE = plain(other=9)
RENAMED = plain(new_name=7)
RECREATED = plain(t=8)
SWAPPED = plain(t=8, old_t=7)
# Another target takes what was this one, or its place; leaves of table 1; table 7 renamed.
FED_TO_ANOTHER = {"public.part": TargetSource(TableId("public", "t"), frozenset([7]))}
GATHERED = {"public.t": TargetSource(TableId("public", "t"), frozenset([8, 9]), root_id=1)}
FROM_OTHER = {"public.t": TargetSource(TableId("public", "other"), frozenset([7]))}


def state(status: str, reason: str | None = None, generation: int = 1, **fed: Any) -> TableState:
    return TableState(
        NOON, "r", "public.t", generation, status, relation_ids=[7], reason=reason, **fed
    )


def life(
    status: str, reason: str | None = None, *, copied: bool = True, attempts: int = 1, **fed: Any
) -> LatestState:
    return LatestState(state(status, reason, **fed), copied, attempts)


AWAY = "it is no longer published, and its target stays as it is"
NEVER = "it was never copied"
RETURNED = (
    "it left the publications and returned, and PostgreSQL did not send the changes in between"
)
AGAIN = "it was dropped and created again on the source"
TAKEN = "it was renamed on the source, and another published table has its name now"

ANEW = "its changes come from other tables than its copy"
COPIED = life("synced")
MARKED = life("needs_sync", "why")
RECOPYING = life("copying", "why")
FULL = life("failed", "full")
GATHERED_COPY = life("synced", root_id=1)


def first(status: str, reason: str | None = None, attempts: int = 1) -> LatestState:
    """A first copy that hasn't ended well."""
    return life(status, reason, copied=False, attempts=attempts)


BUSY = "failed (TableBusy: locked)"
AFTER = "to be tried again after 2026-01-01"

# What is published, the table's life, what is to be done and why, how its copy ended; and unless no
# run is at work on its copy and the policy for what the stream doesn't tell is "evolve", which.
CASES = [
    ("published, unknown", HERE, None, FIRST, NEVER),
    ("copied", HERE, COPIED, APPLY, ""),
    ("copied, then renamed", RENAMED, COPIED, APPLY, ""),
    ("another table took its name", SWAPPED, COPIED, COPY, TAKEN),
    ("another took its name, by hand only", SWAPPED, COPIED, BROKEN, TAKEN, None, "fail"),
    ("copied, then made anew", RECREATED, COPIED, COPY, AGAIN),
    ("copied, then made anew, by hand only", RECREATED, COPIED, BROKEN, AGAIN, None, "fail"),
    ("copied, then left", ELSEWHERE, COPIED, REMOVED, AWAY),
    ("marked", HERE, MARKED, COPY, "why"),
    ("marked, by hand only", HERE, MARKED, BROKEN, "why", None, "ignore"),
    ("marked, then left", ELSEWHERE, MARKED, REMOVED, AWAY),
    ("left", ELSEWHERE, life("removed", "gone"), REMOVED, AWAY),
    ("returned", HERE, life("removed", "gone"), FIRST, RETURNED),
    ("first copy running", HERE, first("copying"), WAIT, NEVER, None, "running"),
    ("first copy killed", HERE, first("copying"), COPY, NEVER, "was killed", "fail"),
    ("first copy killed again", HERE, first("copying", None, 3), BROKEN, NEVER,
     f"was killed, {AFTER} 12:10 UTC"),
    ("killed again, a while ago", HERE, first("copying", None, 2), COPY, NEVER, "was killed"),
    ("killed, running again", HERE, first("copying", None, 3), WAIT, NEVER, None, "running"),
    ("first copy failed by what goes away", HERE, first("failed", "TableBusy: locked"), COPY, NEVER,
     BUSY),
    ("failed by what goes away, again", HERE, first("failed", "TableBusy: locked", 99), BROKEN,
     NEVER, f"{BUSY}, {AFTER} 18:00 UTC"),
    ("failed by what needs somebody", HERE, first("failed", "ConfigError: no key"), BROKEN, NEVER,
     "failed (ConfigError: no key)"),
    ("first copy failed", HERE, first("failed", "full"), COPY, NEVER, "failed (full)"),
    ("first copy failed, then left", ELSEWHERE, first("failed", "full"), REMOVED, AWAY),
    ("copied again", HERE, RECOPYING, WAIT, "why", None, "running"),
    ("copied again, killed", HERE, RECOPYING, COPY, "why", "was killed"),
    ("copied again, killed, by hand only", HERE, RECOPYING, BROKEN, "why", "was killed", "fail"),
    ("copied again, failed", HERE, FULL, COPY, "", "failed (full)"),
    ("copied again, failed, by hand only", HERE, FULL, BROKEN, "", "failed (full)", "fail"),
    ("copied, then it feeds others alone", FED_TO_ANOTHER, COPIED, REMOVED, AWAY),
    ("copied, then gathered", GATHERED, COPIED, COPY, ANEW),
    ("gathered", GATHERED, GATHERED_COPY, APPLY, ""),
    ("gathered, then another root", GATHERED, life("synced", root_id=2), COPY, ANEW),
    ("gathered, then published by its root", RECREATED, GATHERED_COPY, COPY, ANEW),
    ("gathered, then no leaves", HERE | ELSEWHERE, GATHERED_COPY, COPY, ANEW),
    ("gathered, then away", ELSEWHERE, GATHERED_COPY, REMOVED, AWAY),
    ("fed by another table", FROM_OTHER, life("synced", source_table="public.other"), APPLY, ""),
    ("fed by another, then not", RENAMED, life("synced", source_table="public.other"), REMOVED,
     AWAY),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_where_a_table_stands(case):
    _, published, held, action, reason, failed, special = (*case, None, None)[:7]
    running, policy = special == "running", special if special in ("fail", "ignore") else "evolve"
    expected = TableLifecycle("public.t", action, held.state if held else None, reason, failed)
    at = NOON + timedelta(minutes=6)
    found = lifecycle_of("public.t", published, held, running=running, policy=policy, at=at)
    assert found == expected


# States in their order, whether the last copy that counts ended well, how many began since.
LIVES = {
    "a first copy under way": (["copying"], False, 1),
    "a first copy that failed": (["copying", "failed"], False, 1),
    "a first copy that failed, then was killed": (["copying", "failed", "copying"], False, 2),
    "copied": (["copying", "synced"], True, 0),
    "copied, a later copy failed": (["synced", "needs_sync", "copying", "failed"], True, 1),
    "copied, left, returned, a copy failed": (["synced", "removed", "copying", "failed"], False, 1),
    "left": (["synced", "removed"], False, 0),
}


@pytest.mark.parametrize("case", LIVES)
def test_whether_a_target_holds_a_copy(case):
    """By what happened, not by the number of attempts: a first copy may fail many times."""
    statuses, copied, attempts = LIVES[case]
    rows = [state(status, generation=number) for number, status in enumerate(statuses, 1)]
    assert latest_by_name(rows) == {"public.t": LatestState(rows[-1], copied, attempts)}


@pytest.fixture
def job(tmp_path) -> Job:
    lake = (tmp_path / "lake").as_uri()
    made = job_of(pipeline_file(lake, "s"))
    made.ledger.append(SlotMove(NOON, "run", "created", "s", "1", 1, "0/1", 1))
    return made


# What another run writes of the table after this one has read the ledger, who asks, and which rows
# there are in the end.
MEANWHILE = {
    "the same": (["removed"], 1, False, ["synced", "removed"]),
    "nothing": ([], 1, False, ["synced", "removed"]),
    "something else of this copy": (["synced", "needs_sync"], 1, False,
     ["synced", "synced", "needs_sync", "removed"]),
    "it returned and was copied anew": (["copying", "synced"], 2, False,
     ["synced", "copying", "synced"]),
    "it was copied anew, and leaves only now": (["copying"], 2, True,
     ["synced", "copying", "removed"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("meanwhile", "generation", "recopied", "rows"), MEANWHILE.values(), ids=MEANWHILE
)
def test_who_records_that_a_table_left(job, meanwhile, generation, recopied, rows):
    """Once, behind whatever others wrote of it, and never over a copy that was made since."""
    held = job.ledger.append_state(state("synced", incarnation="0/1"), None)
    (found,) = [one for one in read_lifecycles(job, ELSEWHERE) if one.table_name == "public.t"]
    last = held
    for status in meanwhile:
        last = job.ledger.append_state(
            state(status, generation=generation, incarnation="0/1"), last
        )
    left = record_removed(job, [found], recopied=recopied)
    assert [row.status for row in job.ledger.table_rows("public.t")] == rows
    assert left == ([] if rows[-1] != "removed" or meanwhile == ["removed"] else ["public.t"])
    assert job.ledger.table_rows("public.t")[-1].generation == generation


def test_two_runs_record_that_a_table_left(job):
    """At once: one of them does, and the other one has nothing to tell."""
    job.ledger.append_state(state("synced", incarnation="0/1"), None)
    all_lifecycles = read_lifecycles(job, ELSEWHERE)
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: record_removed(job, all_lifecycles), range(4)))
    assert sorted(told, key=len) == [[], [], [], ["public.t"]]
    assert [row.status for row in job.ledger.table_rows("public.t")] == ["synced", "removed"]


# The publication, and whether a run copies a table without a copy by itself.
BY_RUNS = {
    "a pattern that adopts": ({"tables": [{"name": "public.*"}], "new_tables": "adopt"}, True),
    "a pattern that reports": ({"tables": [{"name": "public.*"}]}, False),
    "a table of its own": (
        {"tables": [{"name": "public.t"}, {"name": "public.*"}], "new_tables": "adopt"},
        False,
    ),
    "another pattern": ({"tables": [{"name": "public.u*"}], "new_tables": "adopt"}, False),
}


@pytest.mark.parametrize("publication, expected", BY_RUNS.values(), ids=BY_RUNS)
@pytest.mark.parametrize("published", [HERE, FED_TO_ANOTHER], ids=["itself", "as another target"])
def test_which_first_copies_runs_make(published, publication, expected):
    """Those of tables that runs publish; a target with rows of another table goes by that table."""
    source = {"conn_id": "c", "slot": "s", "publications": [{"name": "p"} | publication]}
    job = job_of(pipeline_file("file:///lake", "s", source=source))
    all_lifecycles = [lifecycle_of(name, published, None) for name in published]
    all_lifecycles += [lifecycle_of("public.t", HERE, life("synced"))]
    found = copied_by_runs(job, published, all_lifecycles)
    assert [table.table_name for table in found] == (list(published) if expected else [])

"""Findings of runs that no table's line shows: external writers, uncopied tables, unused suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from waldelta.config import Source
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import REMOVED, ExternalCommit
from waldelta.monitoring._run_results import Results
from waldelta.monitoring.attention import Attention, on_names
from waldelta.monitoring.reconciliation_status import Compared
from waldelta.monitoring.run_history import RunLine
from waldelta.postgres.unpublished_tables import listed
from waldelta.quantities import counted

# Results of at most this many runs are searched for one that reached apply; if none did, that
# is reported elsewhere.
_MOST_RESULTS = 5


def of_runs(
    results: Results,
    landing: Sequence[RunLine],
    states: Sequence[TableState],
    compared: Compared,
    source: Source,
) -> Iterator[Attention]:
    """Yields attention from the targets' states and the latest results.

    ``landing`` are the runs that land changes, newest first.
    """
    yield from _of_others(states, compared)
    drifted = [s.table_name for s in states if s.status != REMOVED and recorded_drift(s)]
    yield from on_names(
        "warning",
        "drift",
        sorted(drifted),
        "{}: drifted from its source: no run has repaired it",
        "reconciliation",
    )
    run, result = _newest_at_apply(results, landing) or (None, {})
    touched = {
        state.table_name
        for state in states
        if run and state.at > run.at - timedelta(seconds=run.seconds)
    }
    yield from _of_unpublished(
        states, source, [name for name in result.get("unpublished") or () if name not in touched]
    )
    if run is None:
        return
    never = [name for name in result.get("never_copied") or () if name not in touched]
    yield from on_names(
        "warning", "never_copied", never, "{}: published, but never copied: run the initial sync"
    )
    new = [name for name in result.get("new_tables") or () if name not in touched]
    yield from on_names(
        "warning", "new_tables", new, "{}: matches a pattern, but isn't published: run setup"
    )
    unused = [str(told).partition("\n")[0] for told in result.get("unused_suites") or ()]
    page = ("run", run.verb, run.run_id)
    yield from on_names(
        "warning", "unused_expectations", unused, "expectation files without a table: {}", *page
    )


def recorded_drift(state: TableState) -> list[str]:
    """Returns drift that was reported and not repaired; runs compare with the current catalogs."""
    leaves, filters = len(state.unmended_leaves), state.later_filters
    return [
        *([f"{counted(leaves, 'partition')} added, removed or truncated"] if leaves else []),
        *(
            [f"published by other rules since its copy, at last by {filters[-1]}"]
            if filters
            else []
        ),
    ]


def _of_unpublished(
    states: Sequence[TableState], source: Source, reported: Sequence[str]
) -> Iterator[Attention]:
    """Yields tables that the file lists and that are not published.

    An idle check may have found them without a following run, or a run has reported them.
    """
    known = {str(table) for _, table in listed(source)}
    removed = {s.table_name for s in states if s.status == REMOVED and s.table_name in known}
    yield from on_names(
        "failed",
        "unpublished",
        sorted(removed.union(reported)),
        "{}: in the pipeline file, but not published: its changes are not replicated",
    )


def _of_others(states: Sequence[TableState], compared: Compared) -> Iterator[Attention]:
    """Yields targets with external commits, until a copy, or a comparison of all columns, covers
    them.
    """
    written = [
        state.table_name
        for state in states
        if state.foreign_commits
        and state.status != REMOVED
        and not _is_outlived(state.foreign_commits[-1], state.table_name, compared)
    ]
    yield from on_names(
        "warning",
        "external_commits",
        sorted(written),
        "{}: another program wrote to the target, which may differ from the source",
        "reconciliation",
    )


def _is_outlived(commit: ExternalCommit, name: str, compared: Compared) -> bool:
    """Returns whether a comparison covers the commit, by version and time.

    Both are compared, because the versions of a target that was removed begin again.
    """
    answer = compared.answers.get(name)
    if answer is None or answer.version is None:
        return False
    # Earlier versions recorded no time.
    return answer.version >= commit.version and (commit.at is None or answer.at > commit.at)


def _newest_at_apply(
    results: Results, runs: Sequence[RunLine]
) -> tuple[RunLine, dict[str, Any]] | None:
    """Returns the newest run that reached the apply stage, and its result."""
    for run in [run for run in runs if run.status != "running"][:_MOST_RESULTS]:
        if "apply" in ((result := results(run)).get("stages") or {}):
            return run, result
    return None

"""Events, lineage and metrics count the same commits of a run."""

from datetime import UTC, datetime

import pytest

from waldelta.pipeline.after_commit import commits_of, targets_of
from waldelta_airflow.reporting.assets import changed_targets, changed_without_event
from waldelta_airflow.reporting.metrics import metrics_of

AT = datetime(2030, 1, 1, tzinfo=UTC)
# A table's part of the result; its rows for readers, None without a commit that they see.
CASES = {
    "nothing": ({}, None),
    "no rows": ({"inserted": 0, "version": 4}, None),
    "changes": ({"inserted": 4, "updated": 2, "deleted": 1, "skipped": 9}, 7),
    "a row that waits": ({"quarantined": 1}, None),
    "a TRUNCATE": ({"truncated": True}, 0),
    "a copy": ({"rows": 12}, 12),
    "a copy of an empty table": ({"rows": 0}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_one_run_has_the_same_commits_for_all_that_follow(case):
    """Whether a target is fine says only whether its event is sent."""
    counts, rows = CASES[case]
    document = {"verb": "consume", "tables": {"public.t": counts, "public.a": {"rows": 1}}}
    assert [commit.table for commit in targets_of(document)] == ["public.a", "public.t"]
    commits = {commit.table: commit.rows for commit in commits_of(document)}
    assert commits == {"public.a": 1} | ({} if rows is None else {"public.t": rows})
    assert changed_without_event(document) == [*commits]
    of_fine = changed_targets(document | {"passed": ["public.t"]})
    assert of_fine.keys() == commits.keys() - {"public.a"}
    sent = {
        metric.tags["operation"]: metric.value
        for metric in metrics_of("shop", document, AT)
        if metric.tags.get("table") == "public.t" and metric.value
    }
    renamed = {"rows": "copied"}
    unsent = ("truncated", "version")
    assert sent == {renamed.get(k, k): n for k, n in counts.items() if n and k not in unsent}

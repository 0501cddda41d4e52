"""What needs attention because of a pipeline's DAGs, by what it means for the data."""

from dataclasses import replace
from datetime import timedelta

from tests.cases import cases
from tests.support.bookkeeping import NOON, pipeline
from tests.unit.waldelta_airflow.views.test_headline import GLANCE
from waldelta_airflow._dag_attention import of_dags
from waldelta_airflow.views._installed_pipelines import Schedule

HOUR = timedelta(hours=1)
DUE = {"next_run_at": NOON - HOUR}
# The schedule, the active runs, the attention.
STOPPED = [
    ("paused", {"is_paused": True}, (), [("failed", "paused")]),
    ("no run is active", DUE, (), [("failed", "overdue")]),
    ("no run is active, and no scheduler", DUE | {"scheduler_at": NOON - HOUR}, (),
     [("failed", "overdue")]),
    ("a run that nothing follows", DUE | {"scheduler_at": NOON - HOUR}, ("r",),
     [("failed", "overdue")]),
    ("a run that the next one follows", DUE | {"scheduler_at": NOON}, ("r",),
     [("warning", "overdue")]),
    ("late, but not by much", {"next_run_at": NOON - HOUR / 12}, (), []),
    ("not compared", {"paused": frozenset({"maintenance"})}, (),
     [("warning", "paused_maintenance")]),
]  # fmt: skip


@cases("schedule, active, expected", STOPPED)
def test_what_stops_the_changes_is_a_problem(schedule, active, expected):
    """However it stops them; what only delays them is a warning."""
    glance = replace(GLANCE, active=frozenset(active))
    items = of_dags(pipeline("file:///lake"), glance, Schedule(**schedule), NOON)
    assert [(item.severity, item.kind) for item in items] == expected

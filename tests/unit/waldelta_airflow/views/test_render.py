"""What all pages print alike; and the stylesheet has rules for what pages have, and for no more."""

import re
from pathlib import Path

import pytest

from waldelta.stages.check.reports import page
from waldelta_airflow import views
from waldelta_airflow.views._pictures import _KINDS, _STAGES
from waldelta_airflow.views._render import MARKS, schedule

VIEWS = Path(views.__file__).parent
# Classes that templates get as values: states, and the parts of bars.
STATES = {*MARKS, "ok", *_STAGES, *_KINDS}
# A class attribute, whose text may have expressions with quotes.
ATTRIBUTE = re.compile(r"class=\\?([\"'])((?:\{\{.*?\}\}|\{%.*?%\}|(?!\1).)*)")


def test_every_rule_is_of_a_class_that_a_page_has():
    css = re.sub(r"/\*.*?\*/", "", (VIEWS / "style.css").read_text(), flags=re.DOTALL)
    selectors = re.sub(r"[\w-]+\s*:\s*[^;{}()]*(\([^;{}]*\)[^;{}]*)?;", "", css)
    rules = set(re.findall(r"\.([a-zA-Z][\w-]*)", selectors))
    files = [*VIEWS.glob("templates/*.html"), *VIEWS.glob("*.py"), Path(page.__file__)]
    text = "".join(file.read_text() for file in files)
    used = {name for _, of in ATTRIBUTE.findall(text) for name in re.findall(r"[\w-]+", of)}
    assert len(rules) > 50
    assert rules - used - STATES == set()


@pytest.mark.parametrize(
    ("cron", "shown"),
    [
        ("*/15 * * * *", '<span title="*/15 * * * * (UTC)">Every 15 minutes</span>'),
        ("@daily", '<span title="@daily (UTC)">At 00:00</span>'),
        (None, ""),
    ],
)
def test_a_schedule_is_in_words(cron, shown):
    """The expression itself is shown by hovering."""
    assert schedule(cron) == shown

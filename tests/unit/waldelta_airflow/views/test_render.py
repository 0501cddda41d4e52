"""The stylesheet has rules for what pages have, and for nothing else."""

import re
from pathlib import Path

from waldelta.stages.check.reports import page
from waldelta_airflow import views
from waldelta_airflow.views._pictures import _KINDS, _STAGES
from waldelta_airflow.views._render import MARKS

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

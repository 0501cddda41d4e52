"""Which printed values may contain a label that the catalogs have otherwise now."""

import pytest

from waldelta.pipeline.drift.unsent_changes import is_in

DIGEST = "0123456789abcdef" * 2
CASES = [
    ("app.orders", "app.orders", True),
    ("app.orders_2", "app.orders", False),
    ("16999", "app.orders", False),
    ("{app.orders,app.items}", "app.items", True),
    ('{"app.\\"Big One\\""}', 'app."Big One"', True),
    ('(1,"app.f(integer)")', "app.f(integer)", True),
    ("crm=r/postgres", "crm", True),
    ("[sad,ok]", "sad", True),
    ("blue", "sad", False),
    # The attributes of a composite type; digests of all objects, or of those in a schema.
    ("(1,x)", "1 2", True),
    ("anything", f"* {DIGEST}", True),
    ("app.orders", f"app.* {DIGEST}", True),
    ("app.orders", f"staging.* {DIGEST}", False),
    ('"My App".orders', f'"My App".* {DIGEST}', True),
]


@pytest.mark.parametrize("text, label, expected", CASES)
def test_a_label_in_a_text(text, label, expected):
    assert is_in(text, label) is expected

"""What a batch range says of the table behind a target."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from waldelta.changes.decode.target_plan import _check_not_recreated
from waldelta.errors import NeedsSync
from waldelta.lake.ledger import TableState, now
from waldelta.postgres import TableId


@pytest.mark.parametrize(
    ("oid", "name", "place", "present", "is_recreated"),
    [
        pytest.param(9, "t", 3, None, True, id="dropped and created again"),
        pytest.param(9, "t", 3, "u", True, id="renamed, and another created in its place"),
        pytest.param(9, "t", 3, "t", False, id="another had its name for a while"),
        pytest.param(9, "t", -1, None, False, id="described before the range"),
        pytest.param(9, "u", 3, None, False, id="a table of another name"),
        pytest.param(5, "t", 3, None, False, id="the table itself"),
        pytest.param(4, "t", 3, None, False, id="an older table that was called so"),
    ],
)
def test_a_table_that_was_created_again(oid, name, place, present, is_recreated):
    """Its changes come under another oid, so they would be missed; the target was of oid 5."""
    relation = SimpleNamespace(schema="public", name=name, relation_id=oid)
    state = TableState(now(), "r", "public.t", 1, "synced", relation_ids=[5])
    catalog = SimpleNamespace(name=present and TableId("public", present))
    stream = SimpleNamespace(relations=[(relation, place)])
    with pytest.raises(NeedsSync, match="created again") if is_recreated else nullcontext():
        _check_not_recreated(stream, state, catalog)

"""Which types have bounds in files' statistics; by_file has how they are read."""

import pyarrow as pa
import pytest

from waldelta.lake.data_file import order_of, shared_order
from waldelta.types.type_map import BUILT_INS

# Floats may be NaN; truth and bytes are seldom keys.
WITHOUT = {"bool", "bytea", "float4", "float8"}
WHOLE, FEW, MANY = pa.decimal128(15, 0), pa.decimal128(15, 2), pa.decimal128(16, 0)


def test_every_built_in_type_has_an_order_or_is_known_to_have_none():
    found = {built_in.name for built_in in BUILT_INS if order_of(built_in.stored.arrow) is None}
    assert found == WITHOUT


@pytest.mark.parametrize("kind", [built_in.stored.arrow for built_in in BUILT_INS], ids=str)
def test_bounds_are_written_only_in_an_order_in_which_they_are_read(kind):
    order = order_of(kind)
    assert (order is None) == (shared_order(kind, kind) is None)


def test_decimals_that_doubles_hold():
    """Bounds of others may be other numbers; those with a fraction are read, but not written."""
    orders = [order_of(kind) for kind in (WHOLE, FEW, MANY)]
    assert [order is not None for order in orders] == [True, True, False]
    assert order_of(WHOLE).comparable(pa.array([], WHOLE)) is not None
    assert order_of(FEW).comparable(pa.array([], FEW)) is None
    assert shared_order(WHOLE, FEW).kind == pa.decimal128(30, 2)

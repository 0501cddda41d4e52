"""A type is asked for once by whoever asks for many tables' types."""

from contextlib import nullcontext

import pytest

from waldelta.postgres import PgType, type_catalog
from waldelta.postgres.type_catalog import KnownTypes


def test_types_are_asked_for_once(monkeypatch):
    """No connection is opened for what is known; one that isn't there any more stays unknown."""
    there = {(20, -1): PgType(20, -1, "bigint"), (25, -1): PgType(25, -1, "text")}
    asked, opened = [], []
    monkeypatch.setattr(
        type_catalog,
        "read_types",
        lambda _, pairs: asked.append(set(pairs)) or {pair: there[pair] for pair in pairs},
    )
    known = KnownTypes(lambda: opened.append(True) or nullcontext())
    assert known([(20, -1)]) == {(20, -1): there[20, -1]}
    assert known([(20, -1), (25, -1)]) == there
    assert known([(25, -1)]) == {(25, -1): there[25, -1]}
    for _ in range(2):
        with pytest.raises(KeyError):
            known([(25, -1), (99, -1)])
    assert asked == [{(20, -1)}, {(25, -1)}, {(99, -1)}, {(99, -1)}]
    assert len(opened) == 4
    assert known([]) == {}

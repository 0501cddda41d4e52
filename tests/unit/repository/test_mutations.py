"""The table of mutations fits the code: a text that was changed would be a mutation of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS

ROOT = Path(__file__).parents[3]
NUMBERED = [
    pytest.param(mutation, id=f"{number} {mutation.file}")
    for number, mutation in enumerate(MUTATIONS, 1)
]


@pytest.mark.parametrize("mutation", NUMBERED)
def test_the_text_is_there_once_and_its_tests_exist(mutation):
    """The mutated file still is a Python module."""
    source = mutation.path(ROOT).read_text()
    mutated = mutation.mutated(source)
    assert mutated != source
    compile(mutated, mutation.file, "exec")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text() if name else True, test
        assert (ROOT / "tests" / file).is_file(), test

"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.unit.repository.test_architecture import MODULES

WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>>" in path.read_text()]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0

"""The table of mutations fits the code: a text that was changed would be a mutation of nothing."""

from tests.mutations import MUTATIONS
from tests.support.source_code import ROOT


def test_each_text_is_there_once_and_its_tests_exist():
    """The mutated file still is a Python module."""
    for number, mutation in enumerate(MUTATIONS, 1):
        source = mutation.path(ROOT).read_text()
        mutated = mutation.mutated(source)
        assert mutated != source, number
        compile(mutated, mutation.file, "exec")
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert (ROOT / "tests" / file).is_file(), (number, test)
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), (number, test)

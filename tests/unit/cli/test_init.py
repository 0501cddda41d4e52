"""What a user may answer to choose tables: numbers, ranges, tables, schemas."""

import pytest

from tests.unit.stages.setup.test_draft import server, table
from waldelta.cli.init import choose_answered
from waldelta.errors import ConfigError
from waldelta.postgres import TableId
from waldelta.stages.setup.draft import Inventory

TABLES = [TableId("a", "x"), TableId("b.c", "y"), TableId("b.c", "z")]
INVENTORY = Inventory(
    server(), tuple(map(table, TABLES)),
    excluded={TableId("a", "scratch"): "unlogged"},
)  # fmt: skip


@pytest.mark.parametrize(
    "answers, chosen",
    [
        (["all"], [0, 1, 2]),
        (["1"], [0]),
        (["2-3"], [1, 2]),
        (["3", "1", "1-1"], [0, 2]),
        (["a.x"], [0]),
        (['"b.c"'], [1, 2]),
        (["b.c"], [1, 2]),
        (['"b.c".z', "a"], [0, 2]),
    ],
)
def test_answers_choose_tables(answers, chosen):
    found = choose_answered(INVENTORY, answers)
    assert [one.id for one in found] == [TABLES[number] for number in chosen]


@pytest.mark.parametrize(
    "answer, message",
    [
        ("0", "numbers 1 to 3"),
        ("3-1", "numbers 1 to 3"),
        ("4", "numbers 1 to 3"),
        ("x", "schema-qualified"),
        ("a.scratch", "can't be replicated: unlogged"),
        ("a.y", "there is no table a.y"),
    ],
)
def test_other_answers_are_refused(answer, message):
    with pytest.raises(ConfigError, match=message):
        choose_answered(INVENTORY, [answer])

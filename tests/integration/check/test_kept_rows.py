"""Kept rows: rows that contradict a target's mode are found, whichever of them are live."""

import pytest
from deltalake import write_deltalake

from waldelta.lake import Lake
from waldelta.stages.check.measure.failing_rows import find_broken_rows
from waldelta.target_modes.modes import named_mode

COLUMNS = {
    "history": "`a b`, _wd_valid_from_lsn, _wd_valid_to_lsn, _wd_valid_from, _wd_valid_to",
    "soft_delete": "`a b`, _wd_deleted, _wd_deleted_at",
    "changelog": "_wd_lsn, _wd_seq, _wd_op, _wd_unchanged, `a b`, c, _wd_before",
}
TIME = "timestamp'2025-01-0{}'"
FIRST, SECOND, NEVER = TIME.format(1), TIME.format(2), "cast(null as timestamp)"
OPEN = "cast(null as bigint)"
NONE = "cast(null as array<string>)"
# The key ("a b", c) of a changelog's row, and before it; the fields have another order.
KEY = "1, 100, cast(null as struct<c: int, `a b`: int>)"


def moved(a: int, c: int, before: tuple[int, int]) -> str:
    """The key of a row, and the one before it."""
    return f"{a}, {c}, named_struct('c', {before[1]}, 'a b', {before[0]})"


# mode, rows, how many rows break each invariant
CASES = {
    "versions that follow each other":
     ("history", [f"1, 10, 20, {FIRST}, {SECOND}", f"1, 20, {OPEN}, {SECOND}, {NEVER}"],
      {"history": 0}),
    "versions of different keys":
     ("history", [f"1, 10, {OPEN}, {FIRST}, {NEVER}", f"2, 10, {OPEN}, {FIRST}, {NEVER}"],
      {"history": 0}),
    "versions that overlap":
     ("history", [f"1, 10, 21, {FIRST}, {SECOND}", f"1, 20, {OPEN}, {SECOND}, {NEVER}"],
      {"history": 1}),
    "an open version before another one":
     ("history", [f"1, 10, {OPEN}, {FIRST}, {NEVER}", f"1, 20, {OPEN}, {SECOND}, {NEVER}"],
      {"history": 1}),
    "a version that ends before it begins, or where it begins":
     ("history", [f"1, 10, 10, {FIRST}, {SECOND}", f"2, 10, 20, {SECOND}, {FIRST}"],
      {"history": 2}),
    "an end by one measure only, or no begin":
     ("history",
      [f"1, 10, 20, {FIRST}, {NEVER}", f"2, 10, {OPEN}, {FIRST}, {SECOND}",
       f"3, {OPEN}, {OPEN}, {FIRST}, {NEVER}"], {"history": 3}),
    "marks with times": ("soft_delete", [f"1, true, {FIRST}", f"2, false, {NEVER}"],
                         {"soft_delete": 0}),
    "a mark without a time, a time without a mark, neither":
     ("soft_delete",
      [f"1, true, {NEVER}", f"2, false, {FIRST}", f"3, cast(null as boolean), {NEVER}"],
      {"soft_delete": 3}),
    "a key twice": ("soft_delete", [f"1, true, {FIRST}", f"1, false, {NEVER}"], {"soft_delete": 2}),
    "changes in order, after a copy":
     ("changelog",
      [f"1, -1, 'snapshot', {NONE}, {KEY}", f"1, -1, 'snapshot', {NONE}, {KEY}",
       f"2, 1, 'truncate', {NONE}, {KEY}", f"2, 2, 'insert', {NONE}, {KEY}"],
      {"changelog": 0, "_wd_unchanged": 0, "_wd_before": 0}),
    "changes in one place, without a place, of an unknown operation":
     ("changelog",
      [f"2, 1, 'insert', {NONE}, {KEY}", f"2, 1, 'update', {NONE}, {KEY}",
       f"3, {OPEN}, 'delete', {NONE}, {KEY}", f"4, 1, 'merge', {NONE}, {KEY}",
       f"4, 2, cast(null as string), {NONE}, {KEY}"],
      {"changelog": 5, "_wd_unchanged": 0, "_wd_before": 0}),
    "an unknown value": ("changelog", [f"2, 1, 'update', array('v'), {KEY}"],
                         {"changelog": 0, "_wd_unchanged": 1, "_wd_before": 0}),
    "a row that moves, back, and away by way of a third key":
     ("changelog",
      [f"1, -1, 'snapshot', {NONE}, {KEY}", f"2, 1, 'update', {NONE}, {moved(2, 100, (1, 100))}",
       f"2, 2, 'update', {NONE}, {moved(1, 100, (2, 100))}",
       f"3, 1, 'update', {NONE}, {moved(7, 7, (1, 100))}",
       f"3, 2, 'update', {NONE}, {moved(8, 8, (7, 7))}"],
      {"changelog": 0, "_wd_unchanged": 0, "_wd_before": 0}),
    "a key before with its values swapped, and one that has moved or was deleted before":
     ("changelog",
      [f"1, -1, 'snapshot', {NONE}, {KEY}", f"2, 1, 'update', {NONE}, {moved(2, 100, (100, 1))}",
       f"3, 1, 'update', {NONE}, {moved(3, 100, (2, 100))}",
       f"4, 1, 'update', {NONE}, {moved(4, 100, (2, 100))}", f"5, 1, 'delete', {NONE}, {KEY}",
       f"6, 1, 'update', {NONE}, {moved(5, 100, (1, 100))}"],
      {"changelog": 0, "_wd_unchanged": 0, "_wd_before": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_broken_rows_are_counted(runner, lake, name):
    """Spark and DataFusion find the same rows."""
    mode, rows, expected = CASES[name]
    values = ", ".join(f"({row})" for row in rows)
    frame = runner.spark().sql(f"select * from values {values} as t({COLUMNS[mode]})")
    key = ["a b", "c"] if mode == "changelog" else ["a b"]
    target = Lake(lake).target("s.t")
    write_deltalake(target.uri, frame.toArrow())
    for relation in (frame, target.open()):
        found = find_broken_rows(relation, frame.columns, named_mode(mode), key)
        assert {label: keys.rows for label, keys in found.items()} == expected, type(relation)

"""Chunks, tasks and progress: pure plans."""

from dataclasses import replace

import pytest

from waldelta.postgres import Leaf, TableId
from waldelta.postgres.catalog import Through
from waldelta.snapshot.chunks import plan_chunks, plan_tasks

BLOCK = 8192


def leaf(blocks, name="t", oid=1):
    return Leaf(TableId("public", name), oid, oid, blocks, blocks * BLOCK)


def ranges(chunks):
    return [(c.id.name, c.first_block, c.last_block) for c in chunks]


@pytest.mark.parametrize(
    "blocks, chunk_blocks, expected",
    [
        (0, 4, [(0, None)]),
        (1, 4, [(0, None)]),
        (4, 4, [(0, None)]),
        (5, 4, [(0, 4), (4, None)]),
        (8, 4, [(0, 4), (4, None)]),
        (9, 4, [(0, 4), (4, 8), (8, None)]),
        (3, 0.5, [(0, 1), (1, 2), (2, None)]),
    ],
)
def test_a_leaf_is_cut_without_gap_and_its_last_chunk_is_open_ended(blocks, chunk_blocks, expected):
    """Each block lies in exactly one chunk; what is added behind the last is in the last chunk."""
    chunks = plan_chunks([leaf(blocks)], int(chunk_blocks * BLOCK))
    assert ranges(chunks) == [("t", *e) for e in expected]


def test_every_leaf_has_chunks_of_its_own():
    """A partition root's leaves are read one by one, empty ones too."""
    chunks = plan_chunks([leaf(5, "a", 1), leaf(0, "b", 2), leaf(1, "c", 3)], 4 * BLOCK)
    assert ranges(chunks) == [("a", 0, 4), ("a", 4, None), ("b", 0, None), ("c", 0, None)]


def test_small_leaves_share_a_task():
    """A thousand little partitions make no thousand tasks or files; order and chunks stay."""
    chunks = plan_chunks(
        [leaf(1, f"p{n}", n) for n in range(1000)] + [leaf(10, "big", 1001)], 8 * BLOCK
    )
    tasks = plan_tasks(chunks, 8 * BLOCK)
    assert [c for task in tasks for c in task] == chunks
    assert len(tasks) == 127
    assert all(sum(c.size_bytes for c in task) <= 8 * BLOCK for task in tasks)


def test_no_leaves_no_chunks():
    """A partition root without partitions has nothing to read."""
    assert plan_tasks(plan_chunks([], BLOCK), BLOCK) == []


def test_progress_counts_tasks_that_started_and_are_not_active():
    """Spark starts tasks in order: those before the last started that aren't active are done."""
    from waldelta.stages.sync.copy_table import describe_progress

    tasks = plan_tasks(plan_chunks([leaf(40)], 10 * BLOCK), 10 * BLOCK)
    assert describe_progress(tasks, 0, {}) == "0%: 0 of 4 tasks done"
    assert (
        describe_progress(tasks, 3, {1: 500, 2: 7})
        == "25%: 1 of 4 tasks done, reading 2 (507 rows so far)"
    )
    assert describe_progress([], 0, {}) == "0%: 0 of 0 tasks done"


@pytest.mark.parametrize(
    "blocks, chunk_blocks, expected",
    [
        ([0], 4, [(0, None)]),
        ([6, 2, 0], 4, [(0, 2), (2, None)]),  # two blocks of two leaves, then four of one
        ([7, 2], 4, [(0, 2), (2, 6), (6, None)]),
        ([4, 4, 4, 4], 2, [(0, 1), (1, 2), (2, 3), (3, None)]),
    ],
)
def test_leaves_that_are_read_through_one_table_are_cut_together(blocks, chunk_blocks, expected):
    """A range of ctid is one of each leaf: no block is read twice, and chunks are of like size."""
    root = Through(TableId("public", "root"), 9)
    leaves = [replace(leaf(count, f"p{n}", n), through=root) for n, count in enumerate(blocks)]
    chunks = plan_chunks([*leaves, leaf(1, "own", 8)], chunk_blocks * BLOCK)
    assert ranges(chunks) == [*(("root", *e) for e in expected), ("own", 0, None)]
    assert all(len(chunk.leaves) == len(blocks) for chunk in chunks[:-1])
    assert sum(chunk.size_bytes for chunk in chunks) == (sum(blocks) + 1) * BLOCK
    assert all(chunk.size_bytes <= max(chunk_blocks, len(blocks)) * BLOCK for chunk in chunks)


def test_a_leaf_whose_blocks_the_role_may_not_name_is_one_chunk():
    """A grant on columns doesn't include ctid."""
    assert ranges(plan_chunks([replace(leaf(9), has_ctid=False)], BLOCK)) == [("t", 0, None)]

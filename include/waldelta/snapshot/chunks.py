"""Divides a table into chunks, which are read in parallel, and the chunks into tasks.

It also has what sync and its estimate must assume alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from waldelta.postgres import Leaf, TableId, Through

MOST_BYTES_PER_TASK, LEAST_BYTES_PER_TASK = 64 << 20, 8 << 20
_TASKS = 10
# Tables that are copied at once, and how much memory buffers of each until it is a row group.
COPIED_AT_ONCE = 4
COPY_ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks ``first_block`` (inclusive) to ``last_block`` (exclusive; None: to the end) of these
    leaves.

    A leaf that the role may read directly has chunks of its own. Others are read together
    ``through`` the table above them: a range of its ctid is that range in each of its partitions.
    """

    leaves: tuple[Leaf, ...]
    first_block: int
    last_block: int | None
    through: Through | None = None

    @property
    def id(self) -> TableId:
        """The relation that is read."""
        return self.leaves[0].id if self.through is None else self.through.id

    @property
    def size_bytes(self) -> int:
        """The planned size, without rows added after the last planned block."""
        ends = [
            leaf.blocks if self.last_block is None else min(self.last_block, leaf.blocks)
            for leaf in self.leaves
        ]
        return sum(
            max(0, end - self.first_block) * _block_bytes(leaf)
            for end, leaf in zip(ends, self.leaves, strict=True)
        )


def bytes_per_task(table_bytes: int) -> int:
    """Returns how many bytes of a table one task reads.

    Tasks are small enough that no core waits long for another's last task, and large enough for
    files that aren't small.
    """
    return min(MOST_BYTES_PER_TASK, max(LEAST_BYTES_PER_TASK, table_bytes // _TASKS))


def plan_chunks(leaves: Sequence[Leaf], bytes_per_chunk: int) -> list[Chunk]:
    """Divide the leaves into block ranges of at most ``bytes_per_chunk``.

    Leaves that are read through one table are divided together. The last chunk is open-ended, since
    a leaf may have grown between the read of its size and the snapshot; so an empty leaf has one
    chunk, too.
    """
    together: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        together.setdefault(leaf.through or leaf, []).append(leaf)
    chunks = []
    for group in together.values():
        starts = list(_starts(group, bytes_per_chunk))
        for first, last in zip(starts, [*starts[1:], None], strict=True):
            chunks.append(Chunk(tuple(group), first, last, group[0].through))
    return chunks


def _starts(leaves: Sequence[Leaf], bytes_per_chunk: int) -> Iterator[int]:
    """Yields the first blocks of the chunks of leaves that are read together."""
    at, end = 0, max(leaf.blocks for leaf in leaves)
    yield at
    if not all(leaf.has_ctid for leaf in leaves):
        return
    while True:
        row_of_blocks = sum(_block_bytes(leaf) for leaf in leaves if leaf.blocks > at)
        at += max(1, bytes_per_chunk // max(1, row_of_blocks))
        if at >= end:
            return
        yield at


def divide_blocks(leaf: Leaf, first: int, last: int | None, bytes_per_chunk: int) -> list[Chunk]:
    """Divide a range of a leaf's blocks (``last`` None: to the end) as plan_chunks() does."""
    step = max(1, bytes_per_chunk // max(1, _block_bytes(leaf)))
    end = leaf.blocks if last is None else last
    starts = list(range(first, max(end, first + 1), step))
    return [Chunk((leaf,), *ends) for ends in zip(starts, [*starts[1:], last], strict=True)]


def plan_tasks(chunks: Sequence[Chunk], bytes_per_task: int) -> list[list[Chunk]]:
    """Combine small adjacent chunks, so that a thousand small partitions don't make a thousand
    tasks and files.
    """
    tasks: list[list[Chunk]] = []
    size = 0
    for chunk in chunks:
        if tasks and size + chunk.size_bytes <= bytes_per_task:
            tasks[-1].append(chunk)
            size += chunk.size_bytes
        else:
            tasks.append([chunk])
            size = chunk.size_bytes
    return tasks


def _block_bytes(leaf: Leaf) -> int:
    return leaf.size_bytes // leaf.blocks if leaf.blocks else 1

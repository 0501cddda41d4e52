"""How a table is cut into chunks, which are read in parallel, and the chunks into tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waldelta.postgres import Leaf, TableId
    from waldelta.postgres.catalog import Through

MOST_BYTES_PER_TASK, LEAST_BYTES_PER_TASK = 64 << 20, 8 << 20
_TASKS = 6


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks ``first_block`` (inclusive) to ``last_block`` (exclusive; None: to the end) of each of
    these leaves.

    A leaf that the role may read is a chunk's only one. Others are read together ``through`` the
    table above them, whose range of ctid is a range of each of its partitions.
    """

    leaves: tuple[Leaf, ...]
    first_block: int
    last_block: int | None
    through: Through | None = None

    @property
    def id(self) -> TableId:
        """What is read."""
        return self.leaves[0].id if self.through is None else self.through.id

    @property
    def size_bytes(self) -> int:
        """Planned size; what was added behind the last planned block isn't counted."""
        ends = [
            leaf.blocks if self.last_block is None else min(self.last_block, leaf.blocks)
            for leaf in self.leaves
        ]
        return sum(
            max(0, end - self.first_block) * _block_bytes(leaf)
            for end, leaf in zip(ends, self.leaves, strict=True)
        )


def bytes_per_task(table_bytes: int) -> int:
    """How much of a table one task reads: so little that no core waits long for another's last
    task, in files that aren't small.
    """
    return min(MOST_BYTES_PER_TASK, max(LEAST_BYTES_PER_TASK, table_bytes // _TASKS))


def plan_chunks(leaves: Sequence[Leaf], bytes_per_chunk: int) -> list[Chunk]:
    """Cut the leaves into ranges of blocks of at most ``bytes_per_chunk``: each by itself, or those
    that are read through one table together.

    The last chunk is open-ended, since a leaf may have grown between the look at its size and the
    snapshot; so an empty leaf has one chunk too.
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
    """The first blocks of the chunks of leaves that are read together."""
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


def plan_tasks(chunks: Sequence[Chunk], bytes_per_task: int) -> list[list[Chunk]]:
    """Gather small neighbours, so that a thousand little partitions make neither a thousand tasks
    nor files.
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

"""Computes PostgreSQL's 64-bit hash of a text (``hashtextextended``) for many texts at once.

Source: src/common/hashfn.c, hash_bytes_extended() on a little-endian machine: Bob Jenkins' lookup3,
twelve bytes a round. A server with another byte order computes other numbers, and one with an
encoding other than UTF-8 hashes other bytes, so a probe text is compared first.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.scan import packed

Words: TypeAlias = NDArray[np.uint32]
Hashes: TypeAlias = NDArray[np.int64]

# Rows that are hashed together: their state fits in the processor's cache.
_ROWS = 8192
_ROUND = 12
_INITIAL = 0x9E3779B9 + 3923095
_MIX = (
    (0, 2, 4, 2, 1),
    (1, 0, 6, 0, 2),
    (2, 1, 8, 1, 0),
    (0, 2, 16, 2, 1),
    (1, 0, 19, 0, 2),
    (2, 1, 4, 1, 0),
)
_FINAL = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))
# Masks of the rest of a round of n bytes, as three words; the lowest byte of the last word belongs
# to the length.
_KEPT = np.array(
    [[(1 << 8 * min(4, max(0, n - 4 * word))) - 1 for word in range(3)] for n in range(_ROUND)],
    np.uint32,
)


def hash_texts(texts: ArrowArray, seed: int) -> Hashes:
    """Returns the hash of each text as PostgreSQL's bigint; nulls are not allowed.

    >>> import pyarrow as pa
    >>> hash_texts(pa.array(["", "waldelta"]), 0).tolist()
    [-6939563903564495251, 1649827410229605319]
    """
    source, offsets = packed(texts, "")
    padded = np.concatenate([source, np.zeros(_ROUND, np.uint8)])
    # Each byte is the start of a word.
    words: Words = np.lib.stride_tricks.as_strided(padded[:4].view("<u4"), (len(padded) - 3,), (1,))
    lengths = np.diff(offsets)
    # The longest come first, so that rows with rounds left are adjacent.
    order = np.argsort(-lengths, kind="stable")
    found = np.empty(len(lengths), np.int64)
    with np.errstate(over="ignore"):
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            found[rows] = _hash(words, offsets[:-1][rows], lengths[rows], seed)
    return found


def _hash(words: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64], seed: int) -> Hashes:
    """Returns the hashes of rows in descending order of their lengths."""
    begun = (lengths + _INITIAL).astype(np.uint32)
    state = [begun, begun.copy(), begun.copy()]
    if seed:
        state[0] += np.uint32(seed >> 32 & 0xFFFFFFFF)
        state[1] += np.uint32(seed & 0xFFFFFFFF)
        _mix(state)
    rounds = lengths // _ROUND
    # For each n: how many rows have more than n rounds.
    going = np.searchsorted(
        -rounds, -np.arange(1, (rounds[0] if len(rounds) else 0) + 1), side="right"
    )
    for number, count in enumerate(going):
        part = [word[:count] for word in state]
        at = starts[:count] + _ROUND * number
        for place in range(3):
            part[place] += words[at + 4 * place]
        _mix(part)
    rest = lengths - _ROUND * rounds
    kept, at = _KEPT[rest], starts + _ROUND * rounds
    state[0] += words[at] & kept[:, 0]
    state[1] += words[at + 4] & kept[:, 1]
    state[2] += (words[at + 8] & kept[:, 2]) << np.uint32(8)
    for target, by, bits in _FINAL:
        state[target] ^= state[by]
        state[target] -= _rotated(state[by], bits)
    both: NDArray[np.uint64] = state[1].astype(np.uint64) << np.uint64(32) | state[2]
    return both.view(np.int64)


def _mix(state: list[Any]) -> None:
    for target, by, bits, grown, added in _MIX:
        state[target] -= state[by]
        state[target] ^= _rotated(state[by], bits)
        state[grown] += state[added]


def _rotated(word: Words, bits: int) -> Words:
    rotated: Words = word << np.uint32(bits) | word >> np.uint32(32 - bits)
    return rotated

"""Network addresses in binary format."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, u1
from waldelta.types.wire._values import HEX, Converter, fixed, joined, masked, refuse, sized

_IPV4, _IPV6 = 2, 3
_BYTES = {_IPV4: 4, _IPV6: 16}
_HEADER = 4  # Family, bits of the mask, whether it is a cidr, bytes of the address.


def _address(values: Messages, valid: Mask, *, is_cidr: bool) -> ArrowArray:
    """Convert IPv4 addresses all at once, and distinct IPv6 addresses one by one.

    Each IPv6 address is shortened at its own zeros.
    """
    source, start = values.bytes, values.start
    family, bits, size = (u1(source, start + k).astype(np.int64) for k in (0, 1, 3))
    width = np.select([family == kind for kind in _BYTES], list(_BYTES.values()), -1)
    wrong = (
        (width < 0) | (size != width) | (values.end - start != _HEADER + width) | (bits > 8 * width)
    )
    refuse(values, valid & wrong, "no network address")
    is_4 = valid & (family == _IPV4)
    parts = [pa.array(u1(source, start + _HEADER + k)).cast(pa.string()) for k in range(4)]
    text: ArrowArray = pc.binary_join_element_wise(*parts, ".")
    is_6 = np.flatnonzero(valid & (family == _IPV6))
    if len(is_6):
        words = source[(start[is_6] + _HEADER)[:, None] + np.arange(16)]
        distinct, which = np.unique(words, axis=0, return_inverse=True)
        printed = pa.array([_ipv6(address.tobytes()) for address in distinct], pa.string())
        text = pc.replace_with_mask(
            text, pa.array(valid & ~is_4), printed.take(pa.array(which.reshape(-1)))
        )
    masked_text = joined(text, "/", pa.array(bits).cast(pa.string()))
    text = masked_text if is_cidr else pc.if_else(pa.array(bits == 8 * width), text, masked_text)
    return masked(text, valid)


def _ipv6(address: bytes) -> str:
    """Print an IPv6 address as pg_inet_net_ntop does.

    The first longest sequence of zeros is left out, and an embedded IPv4 address is printed as one.
    """
    words = [int.from_bytes(address[k : k + 2], "big") for k in range(0, 16, 2)]
    best, length = -1, 1
    for first in range(8):
        run = next((n for n, word in enumerate(words[first:]) if word), 8 - first)
        if run > length:
            best, length = first, run
    embeds = best == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF))
    texts = [f"{word:x}" for word in words]
    if embeds:
        texts[6:] = [".".join(str(byte) for byte in address[12:])]
    if best < 0:
        return ":".join(texts)
    return ":".join(texts[:best]) + "::" + ":".join(texts[best + length :])


def _hardware(values: Messages, valid: Mask, *, size: int) -> ArrowArray:
    start = sized(values, valid, size)
    if not valid.any():
        return pa.nulls(len(valid), pa.string())
    data = values.bytes[np.where(valid, start, 0)[:, None] + np.arange(size)]
    characters = np.full((len(valid), 3 * size), ord(":"), np.uint8)
    characters[:, 0::3], characters[:, 1::3] = HEX[data >> 4], HEX[data & 15]
    return masked(fixed(characters[:, :-1]), valid)


CONVERTERS: dict[str, Converter] = {
    "inet": partial(_address, is_cidr=False),
    "cidr": partial(_address, is_cidr=True),
    "macaddr": partial(_hardware, size=6),
    "macaddr8": partial(_hardware, size=8),
}

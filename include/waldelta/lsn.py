"""Log sequence numbers: positions in PostgreSQL's write-ahead log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"\A([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")
# XLOG_BLCKSZ, SizeOfXLogShortPHD, and SizeOfXLogLongPHD: the header of a file's first page.
_PAGE_BYTES = 8192
_HEADER_BYTES = 24
_FIRST_HEADER_BYTES = 40


@dataclass(frozen=True, slots=True, order=True)
class Lsn:
    """A WAL position, as PostgreSQL's type ``pg_lsn``: a byte offset, printed as ``16/B374D848``.

    >>> Lsn.parse("16/B374D848").value
    97500059720
    >>> str(Lsn(97500059720))
    '16/B374D848'
    >>> Lsn.parse("0/20") - Lsn.parse("0/10")
    16
    """

    value: int

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse PostgreSQL's text form; raises ValueError for anything else."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(f"not a WAL position: {text!r}")
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    def of_record(self, segment_bytes: int) -> Lsn:
        """Returns where the last record before this insert position ends, for a WAL file size.

        The insert position is where the next record begins. When a page is full, that is after the
        next page's header, which isn't written yet. The last record ends before it, and a reader
        stops there (XLogBytePosToRecPtr, which the insert position comes from, and
        XLogBytePosToEndRecPtr in xlog.c).

        >>> texts = ["0/5000028", "0/5002018", "0/5002000", "0/5002020", "0/5002028", "0/5000030"]
        >>> [str(Lsn.parse(text).of_record(16 << 20)) for text in texts]
        ['0/5000000', '0/5002000', '0/5002000', '0/5002020', '0/5002028', '0/5000030']
        >>> lsn = Lsn.parse("0/5100028")
        >>> str(lsn.of_record(1 << 20)), str(lsn.of_record(16 << 20))
        ('0/5100000', '0/5100028')
        """
        is_first = self.value % segment_bytes < _PAGE_BYTES
        header = _FIRST_HEADER_BYTES if is_first else _HEADER_BYTES
        return Lsn(self.value - header) if self.value % _PAGE_BYTES == header else self

    def __sub__(self, other: Lsn) -> int:
        """Returns the bytes of WAL between two positions."""
        return self.value - other.value

    def __add__(self, size_bytes: int) -> Lsn:
        return Lsn(self.value + size_bytes)

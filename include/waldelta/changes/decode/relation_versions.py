"""Relation versions: the columns of a relation's messages, and the stream range where they apply.

This step between plan and decode is pure. A Relation message describes the messages after it, up to
the next one of the same relation. Within a streamed transaction, it describes only that
transaction's rows, and other transactions' rows from the Stream Commit on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints
from waldelta.lake.changelog import Stream
from waldelta.pgoutput.messages import MARK, Relation, read_relation
from waldelta.pgoutput.transactions import order_of

_END = int(np.iinfo(np.int64).max)
_SKIPPED = MARK + "R"


@dataclass(frozen=True, slots=True)
class RelationVersion:
    """A relation as a Relation message describes it, for messages landed in a range.

    The range is between the positions (order_of()) ``since`` and ``until``. ``transaction`` is the
    xid8 of the streamed transaction whose messages it describes; None: of those that weren't
    streamed. ``everywhere``: of all messages, because no other version of the relation is known.
    """

    since: int
    relation: Relation
    until: int = _END
    transaction: int | None = None
    everywhere: bool = False

    def describes(self, place: Ints, is_streamed: Bools, xid8: Ints) -> Bools:
        """Returns which messages of the relation this version describes, by their positions as
        landed.
        """
        if self.everywhere:
            return np.ones(len(place), np.bool_)
        within = (place > self.since) & (place < self.until)
        if self.transaction is None:
            return within & ~is_streamed
        of_it: Bools = xid8 == self.transaction
        return within & is_streamed & of_it


@dataclass(frozen=True, slots=True)
class _Sent:
    """A relation's description from a message on.

    ``relation`` is None where that message is skipped, so that nothing describes the rows.
    """

    relation_id: int
    since: int
    relation: Relation | None
    transaction: int | None


def read_versions(stream: Stream, relation_ids: Iterable[int]) -> list[RelationVersion]:
    """Returns all versions of these relations that rows of the stream may need.

    Where all versions of a relation are equal, there is only one.
    """
    descriptions = sorted(
        _descriptions(stream, frozenset(relation_ids)),
        key=lambda description: (
            description.relation_id,
            -1 if description.transaction is None else description.transaction,
            description.since,
        ),
    )
    groups = groupby(descriptions, key=attrgetter("relation_id"))
    lacking = {relation_id for _, relation_id in stream.undescribed}
    return [
        version
        for relation_id, group in groups
        for version in _bound_versions([*group], is_whole=lacking.isdisjoint((relation_id, None)))
    ]


def _descriptions(stream: Stream, ids: frozenset[int]) -> Iterator[_Sent]:
    """Yields the description in each Relation message.

    A description in a streamed transaction is yielded again at the transaction's Stream Commit,
    from where on it holds for other transactions.
    """
    kind, relation_id = stream.timeline["kind"], stream.timeline["relation_id"]
    ours = pc.and_(
        pc.equal(kind, "R"), pc.is_in(relation_id, value_set=pa.array(sorted(ids), pa.int64()))
    )
    condition = pc.or_(ours, pc.is_in(kind, value_set=pa.array(["c", _SKIPPED])))
    # Every batch is a decoding session of its own, which doesn't know what another session has
    # sent.
    streamed: dict[tuple[int, int], list[tuple[int, Relation | None]]] = {}
    for row in stream.timeline.filter(condition).to_pylist():
        batch, xid8, in_front = row["batch"], row["xid8"], row["streamed_xid"]
        place = order_of(batch, row["seq"])
        if row["kind"] == "c":
            # pgoutput treats what it sent in a streamed transaction as known to all transactions
            # once that one has committed, but not when it was only prepared.
            yield from (
                _Sent(oid, place, relation, None)
                for oid, relation in streamed.pop((batch, xid8), ())
            )
            continue
        for oid, relation in _relations(row, ids):
            yield _Sent(oid, place, relation, None if in_front is None else xid8)
            if in_front is not None and not stream.segments.is_voided(batch, in_front):
                streamed.setdefault((batch, xid8), []).append((oid, relation))


def _relations(
    row: Mapping[str, Any], ids: frozenset[int]
) -> Iterator[tuple[int, Relation | None]]:
    """Yields what a Relation message describes.

    A skipped message that is too short to name its relation may be about any of them.
    """
    if row["kind"] == "R":
        yield (
            row["relation_id"],
            read_relation(row["data"], streamed=row["streamed_xid"] is not None),
        )
    else:
        yield from ((oid, None) for oid in sorted(ids) if row["relation_id"] in (oid, None))


def _bound_versions(descriptions: list[_Sent], *, is_whole: bool) -> Iterator[RelationVersion]:
    """Yields versions of one relation, each up to the next version of its transaction.

    Without ``is_whole``, some rows have no version.
    """
    if (
        is_whole
        and (first := descriptions[0].relation) is not None
        and all(one.relation == first for one in descriptions)
    ):
        # The earliest position still orders it among the versions of the target's other relations.
        yield RelationVersion(min(one.since for one in descriptions), first, everywhere=True)
        return
    for _, group in groupby(descriptions, key=attrgetter("transaction")):
        of_transaction = list(group)
        for one, following in zip(of_transaction, [*of_transaction[1:], None], strict=True):
            until = _END if following is None else following.since
            if one.relation is not None:
                yield RelationVersion(one.since, one.relation, until, one.transaction)

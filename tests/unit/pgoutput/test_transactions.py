"""Which messages count, and in which order: tables of control messages in, places out."""

import numpy as np
import pytest

from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.pgoutput.message_kinds import BY_LETTER, KINDS
from waldelta.pgoutput.messages import Control
from waldelta.pgoutput.transactions import Landmark, prepared_transactions, resolve


def stream(script):
    """A log written as one string per batch: words are messages in order.

    ``r`` a plain row, ``7r`` a row of streamed (sub)transaction 7; ``S7 E7`` a chunk of 7, ``c7``,
    ``p7``, ``b7``, ``P7``, ``K7``, ``r7``; ``A7`` all of 7 rolled back, ``A7/8`` its subtransaction
    8. Gives landmarks and rows.
    """
    landmarks, rows = [], []
    for batch, words in script.items():
        for seq, word in enumerate(words.split()):
            if word.endswith("r") and (word == "r" or word[:-1].isdigit()):
                rows.append((batch, seq, int(word[:-1] or -1)))
                continue
            kind, (xid, _, subxid) = word[0], word[1:].partition("/")
            control = Control(
                kind, int(xid), int(subxid or xid), gid=xid if kind in "bPpKr" else "",
                lsn=100 + seq, at_us=seq,
            )  # fmt: skip
            landmarks.append(Landmark(batch, seq, int(xid), control))
    return landmarks, rows


def order(script, after=0, upto=None):
    """The rows that count, in commit order, each as batch.seq."""
    landmarks, rows = stream(script)
    batch, seq, streamed = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    segments = resolve(landmarks, after, upto or max(script))
    places = segments.places(batch, seq, streamed)
    inside = (places >= 0) & ((batch > after) | np.isin(batch, [s.batch for s in segments.older]))
    assert len(set(places[inside].tolist())) == inside.sum()
    return " ".join(
        f"{b}.{s}"
        for p, b, s in sorted(zip(places[inside], batch[inside], seq[inside], strict=True))
    )


CASES = {
    "plain rows stand in commit order": ({1: "r r r", 2: "r"}, 0, "1.0 1.1 1.2 2.0"),
    "a streamed transaction counts at its commit": ({1: "S7 7r E7 r S7 7r E7 r c7 r"}, 0,
     "1.3 1.7 1.1 1.5 1.9"),
    "without a commit it doesn't count": ({1: "r S7 7r E7 r"}, 0, "1.0 1.4"),
    "a commit in another batch doesn't make its chunks count": ({1: "S7 7r E7", 2: "S7 7r E7 c7"},
     0, "2.1"),
    "a rolled back one doesn't count": ({1: "S7 7r E7 A7 r"}, 0, "1.4"),
    "a subtransaction rolled back takes only its own": ({1: "S7 7r 8r 9r E7 A7/8 S7 7r E7 c7"}, 0,
     "1.1 1.3 1.7"),
    "another transaction's subtransaction in another batch isn't meant": (
        {1: "S7 8r E7 A7/8 c7", 2: "S9 8r E9 c9"},
        0,
        "2.1",
    ),
    "interleaved chunks": ({1: "S7 7r E7 S9 9r E9 S7 7r E7 c9 S7 7r E7 c7"}, 0, "1.4 1.1 1.7 1.11"),
    "prepared and committed in one batch": ({1: "r b7 r P7 r K7 r"}, 0, "1.0 1.4 1.2 1.6"),
    "prepared and rolled back": ({1: "r b7 r P7 r r7 r"}, 0, "1.0 1.4 1.6"),
    "prepared and never decided": ({1: "r b7 r P7 r"}, 0, "1.0 1.4"),
    "prepared in a batch, committed in the next": ({1: "r b7 r P7 r", 2: "r K7 r"}, 0,
     "1.0 1.4 2.0 1.2 2.2"),
    "prepared before the range": ({1: "r b7 r P7 r", 2: "r", 3: "r K7 r"}, 1, "2.0 3.0 1.2 3.2"),
    "prepared before the range, decided before it": ({1: "b7 r P7", 2: "K7 r", 3: "r"}, 2, "3.0"),
    "streamed, then prepared": ({1: "S7 7r 8r E7 A7/8 S7 7r E7 p7 r", 2: "r K7 r"}, 0,
     "1.9 2.0 1.1 1.6 2.2"),
    "streamed, prepared, never decided": ({1: "S7 7r E7 p7 r"}, 0, "1.4"),
    "streamed and prepared before the range": ({1: "S7 7r E7 r p7", 2: "K7 r"}, 1, "1.1 2.1"),
    "prepared twice under one name": ({1: "b7 r P7 r7", 2: "b7 r P7 K7"}, 0, "2.1"),
    "streamed once more after it was prepared": ({1: "S7 7r E7 p7", 2: "S7 7r E7 r K7"}, 1,
     "2.3 1.1"),
    "two prepared, committed in the other order": ({1: "b7 r P7 b9 r P9 K9 K7"}, 0, "1.4 1.1"),
    "batches without any control message beside one that has": ({1: "r", 2: "S7 7r E7 c7", 3: "r"},
     0, "1.0 2.1 3.0"),
    "a message outside any transaction between chunks": ({1: "S7 7r E7 r S7 7r E7 c7"}, 0,
     "1.3 1.1 1.5"),
}  # fmt: skip


@pytest.mark.parametrize("script, after, expected", CASES.values(), ids=CASES)
def test_order(script, after, expected):
    """Rows that count, in the order of their commits."""
    assert order(script, after) == expected


def test_commit_position_and_time():
    """Rows of a plain stretch keep their own; others take their decision's."""
    landmarks, rows = stream({1: "r S7 7r E7 c7", 2: "b8 r P8 K8"})
    batch, seq, streamed = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    segments = resolve(landmarks, 0, 2)
    at = segments.find(batch, seq, streamed)
    assert segments.commit_lsn(at, np.array([5, 0, 0])).tolist() == [5, 104, 103]
    assert segments.commit_ts_us(at, np.array([5, 0, 0])).tolist() == [5, 4, 3]


def test_a_transaction_whose_prepare_is_gone_is_named():
    """Its changes aren't in the log: somebody must decide whether that matters."""
    segments = resolve(stream({2: "r K7 r"})[0], 1, 2)
    assert [(p.gid, p.xid8, p.decided_in) for p in segments.missing] == [("7", 7, 2)]


@pytest.mark.parametrize("kind", [kind.letter for kind in KINDS if kind.version == 1] + ["Z"])
def test_a_kind_that_decides_nothing_stops_by_name(kind):
    """A message that doesn't begin or end a streamed or prepared transaction isn't a commit."""
    landmark = Landmark(2, 5, 7, Control(kind, 7, gid="7"))
    with pytest.raises(DecodeError, match=f"kind at byte 0: {kind!r} of batch 2, message 5"):
        resolve([landmark], 1, 2)


def test_prepared_transactions_with_their_decisions():
    """What retention has to keep."""
    landmarks, _ = stream({1: "b7 r P7 b8 r P8", 2: "S9 9r E9 p9 K7", 3: "r8"})
    found = [(p.gid, p.batch, p.decided_in) for p in prepared_transactions(landmarks)]
    assert sorted(found) == [("7", 1, 2), ("8", 1, 3), ("9", 2, None)]


def random_log(rng):
    """Batches of valid messages: each streams again what is still open, as every call does."""
    xids, waiting, script = iter(range(100, 10_000)), [], {}
    for batch in range(1, rng.randrange(2, 6)):
        words, streams = [], {}
        for _ in range(rng.randrange(25)):
            action = rng.choice("rrSSSAcpbKr")
            if action == "r" and rng.random() < 0.5:
                words.append("r")
            elif action == "S":
                xid = rng.choice([*streams, str(next(xids))])
                subxids = streams.setdefault(xid, [xid])
                subxids += [str(next(xids))] * (rng.random() < 0.4)
                words += [
                    f"S{xid}",
                    *(f"{rng.choice(subxids)}r" for _ in range(rng.randrange(4))),
                    f"E{xid}",
                ]
            elif action == "A" and streams:
                xid = rng.choice(list(streams))
                gone = rng.choice(streams[xid])
                streams[xid].remove(gone)
                words.append(f"A{xid}" if gone == xid else f"A{xid}/{gone}")
                if gone == xid:
                    del streams[xid]
            elif action in "cp" and streams:
                xid = rng.choice(list(streams))
                del streams[xid]
                words.append(f"{action}{xid}")
                waiting += [xid] * (action == "p")
            elif action == "b":
                xid = str(next(xids))
                words += [f"b{xid}", *["r"] * rng.randrange(3), f"P{xid}"]
                waiting.append(xid)
            elif action in "Kr" and waiting:
                words.append(f"{action}{waiting.pop(rng.randrange(len(waiting)))}")
        script[batch] = " ".join(words)
    return script


class Subscriber:
    """Applies messages one by one, as PostgreSQL does; notes only batches behind ``after``."""

    def __init__(self, after):
        self.after, self.batch, self.applied, self.waiting = after, 0, [], {}
        self.streams, self.stream, self.prepared = {}, None, None

    def read(self, script):
        for self.batch, words in script.items():
            self.streams = {}
            for seq, word in enumerate(words.split()):
                if word.endswith("r") and (word == "r" or word[:-1].isdigit()):
                    self.row((f"{self.batch}.{seq}", word[:-1]))
                else:
                    xid, _, subxid = word[1:].partition("/")
                    getattr(self, BY_LETTER[word[0]].name.lower().replace(" ", "_"))(xid, subxid)
        return " ".join(row for row, _ in self.applied)

    def row(self, row):
        if row[1]:
            self.stream.append(row)
        elif self.prepared is not None:
            self.prepared.append(row)
        else:
            self.apply([row])

    def apply(self, rows):
        self.applied += rows if self.batch > self.after else []

    def stream_start(self, xid, _):
        self.stream = self.streams.setdefault(xid, [])

    def stream_stop(self, *_):
        self.stream = None

    def stream_abort(self, xid, subxid):
        self.streams[xid] = [row for row in self.streams[xid] if subxid and row[1] != subxid]

    def begin_prepare(self, *_):
        self.prepared = []

    def prepare(self, xid, _):
        self.waiting[xid], self.prepared = self.prepared, None

    def stream_prepare(self, xid, _):
        self.waiting[xid] = self.streams.pop(xid)

    def stream_commit(self, xid, _):
        self.apply(self.streams.pop(xid))

    def commit_prepared(self, xid, _):
        self.apply(self.waiting.pop(xid))

    def rollback_prepared(self, xid, _):
        del self.waiting[xid]


def test_any_log_reads_as_a_subscriber_would_apply_it():
    """Streams, savepoints and prepared transactions at random, from any batch on."""
    rng = chosen_random()
    for _ in rounds(2_000):
        script = random_log(rng)
        after = rng.randrange(max(script))
        if any(rows := stream(script)[1]):
            assert order(script, after) == Subscriber(after).read(script), (script, rows)

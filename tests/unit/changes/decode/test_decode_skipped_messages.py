"""Any single message that is skipped, while landing or later: the others count as ever."""

from dataclasses import replace
from shutil import copytree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import write_deltalake

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import (
    BOTH_WAYS,
    T,
    aborted,
    change_log,
    chunk,
    commit,
    decided,
    described,
    plain,
    plan_of,
    prepared,
    row,
)
from waldelta.changes.decode.decode import CHANGE_COLUMNS, decode
from waldelta.changes.decode.relation_versions import read_versions
from waldelta.decision_kinds import MESSAGE
from waldelta.errors import DecodeError
from waldelta.lake import Lake
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import SKIPPED, Decision, Decisions, SentMessage, now
from waldelta.lake.ledger.decisions import WAITING
from waldelta.pgoutput.envelope import Envelope
from waldelta.pgoutput.message_kinds import ROW_KINDS, TIMELINE_KINDS
from waldelta.pgoutput.messages import MARK, UnreadMessage

FIRST = (
    plain(6, described(), row(1), row(2))
    + chunk(7, described(xid=7), row(3, 7), row(4, 8))
    + plain(9, row(5))
    + aborted(7, 8)
    + chunk(7, row(6, 7))
    + commit(7)
    + plain(10, enc.truncate([T]), row(7), lsn=600)
    + prepared(11, row(8))
    + plain(12, row(9), lsn=650)
    + decided(11)
    + plain(13, described(BOTH_WAYS), enc.insert(T, ["x", "10"]), lsn=800)
)
SECOND = plain(
    14, described(BOTH_WAYS), enc.insert(T, ["x", "11"]), enc.insert(T, ["x", "12"]), lsn=900
)
_END_AT = {"C": 10, "c": 14, "P": 10, "p": 10, "K": 10, "r": 10}


PLAN = plan_of(change_log(FIRST))


def positions(messages):
    """As the slot function has them: whatever ends a transaction stands at its end."""
    found = []
    for number, (_, message) in enumerate(messages):
        at = _END_AT.get(chr(message[0]))
        found.append(number if at is None else int.from_bytes(message[at : at + 8], "big"))
    return found


def unread(messages, number):
    xid, message = messages[number]
    return UnreadMessage.of(positions(messages)[number], xid, message)


def write(folder, batches, skipped=(), whole=None):
    """A change log; ``skipped`` landed unread, ``whole`` is the first batch before that."""
    parts = []
    for number, messages in enumerate(batches, 1):
        xids, data = zip(*messages, strict=True)
        envelope = Envelope(1000, 4, {(message.lsn, message.id) for message in skipped})
        found = envelope.add(
            np.array(positions(whole or messages)), np.array(xids), enc.messages(*data)
        )
        whole = None
        timeline = pc.or_(
            pc.is_in(found["kind"], pa.array(TIMELINE_KINDS)), pc.starts_with(found["kind"], MARK)
        )
        table = pa.Table.from_batches([found]).append_column(
            "batch", pa.repeat(pa.scalar(number), len(found))
        )
        parts.append(
            table.append_column("timeline", timeline).append_column(
                "moves", pa.repeat(False, len(found))
            )
        )
    log = ChangeLog(Lake(folder.as_uri()), "slot")
    write_deltalake(log.uri, pa.concat_tables(parts), partition_by=["batch"])
    return log


def keys(log, after=0, upto=2):
    """The keys of all events of a range, in commit order."""
    stream = log.stream(after, upto)
    versions = tuple(read_versions(stream, [T]))
    names = [[column.name for column in version.relation.columns] for version in versions]
    plan = replace(
        PLAN,
        versions=versions,
        positions=tuple((of.index("id"), of.index("v")) for of in names),
        segments=stream.segments,
        undescribed=stream.undescribed,
    )
    parts = log.rows_of(stream.segments, [T], plan.snapshot, list(CHANGE_COLUMNS))
    events = [
        event
        for part in parts
        if len(part)
        for table in decode(part, plan)
        for event in table.to_pylist()
    ]
    return [int(event["c0"]) for event in sorted(events, key=lambda event: event["ord"])]


ALL_KEYS = [1, 2, 5, 3, 6, 7, 9, 8, 10, 11, 12]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A lake whose change log lacks no message."""
    folder = tmp_path_factory.mktemp("whole")
    assert keys(write(folder, [FIRST, SECOND])) == ALL_KEYS
    return folder


@pytest.fixture(scope="module")
def landed(whole):
    """What landed of each of its batches."""
    log = ChangeLog(Lake(whole.as_uri()), "slot")
    return {batch: log.landed(batch) for batch in (1, 2)}


def each_message():
    """The numbers of the first batch's messages; make test has one of each kind, and of those of
    the streamed and of the prepared transaction.
    """
    again = pytest.mark.nightly("a message of a kind that another one has")
    kinds = [(chr(message[0]), xid in (7, 8), xid == 11) for xid, message in FIRST]
    return [
        pytest.param(number, marks=[again] if kind in kinds[:number] else [])
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("number", each_message())
def test_any_message_skipped_while_landing(tmp_path, landed, number):
    """The server's counts stay; only what needs the message is left out."""
    log = write(tmp_path, [FIRST, SECOND], [unread(FIRST, number)])
    for batch, expected in landed.items():
        found = log.landed(batch)
        assert found.transactions == expected.transactions
        assert found.end_lsn == expected.end_lsn
    left = keys(log)
    assert left == [key for key in ALL_KEYS if key in left]
    assert {11, 12} <= set(left)
    kind = chr(FIRST[number][1][0])
    if kind in "CAEOT":
        assert left == ALL_KEYS
    if kind in "BbcPK":
        xid = FIRST[number][0]
        of = {6: {1, 2}, 9: {5}, 7: {3, 6}, 10: {7}, 11: {8}, 12: {9}, 13: {10}}[xid]
        assert set(ALL_KEYS) - set(left) == of


def quarantined(messages, number, status, **more):
    """The row of a message of the first batch that can't be read."""
    message = unread(messages, number)
    sent = [SentMessage(1, number, message.lsn, message.xid, message.raw)]
    key = message.id
    return Decision(
        now(), "r", status, "public.t", 1, 0, key, lsn=message.lsn, messages=sent, kind=MESSAGE,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("number", each_message())
def test_any_message_skipped_once_it_has_landed(tmp_path, whole, landed, number):
    """By the quarantine's row, which outlasts everything that prunes."""
    lake = Lake(copytree(whole, tmp_path / "lake").as_uri())
    skipped = quarantined(FIRST, number, SKIPPED, by="Ann", reason="known")
    quarantine = Decisions(lake)
    quarantine.add([skipped, replace(skipped, status="resolved")])
    quarantine.prune(now())
    log = ChangeLog(lake, "slot")
    assert log.landed(1).transactions == landed[1].transactions
    left = keys(log)
    assert left == [key for key in ALL_KEYS if key in left]
    assert {11, 12} <= set(left)
    if chr(FIRST[number][1][0]) in ROW_KINDS:
        assert len(left) >= len(ALL_KEYS) - 1


def test_a_message_that_nobody_has_skipped_counts(tmp_path, whole):
    lake = Lake(copytree(whole, tmp_path / "lake").as_uri())
    rows = [quarantined(FIRST, number, WAITING) for number in range(len(FIRST))]
    Decisions(lake).add(rows)
    assert keys(ChangeLog(lake, "slot")) == ALL_KEYS


def skips(messages, whole, version):
    """What landing asks an operator to skip, one by one, until it reads a whole call."""
    xids, data = zip(*messages, strict=True)
    asked = []
    while len(asked) == len(set(asked)):
        envelope = Envelope(1000, version, {(message.lsn, message.id) for message in asked})
        try:
            envelope.add(np.array(positions(whole)), np.array(xids), enc.messages(*data))
            envelope.end()
        except DecodeError as err:
            asked.append(err.unread)
        else:
            return asked
    raise AssertionError(f"skipped already: {asked[-1]}")


def altered(messages, number, letter):
    """With another first byte of one message, or with an empty message in its place."""
    xid, message = messages[number]
    return [
        *messages[:number],
        (xid, letter.encode() + message[1:] if letter else b""),
        *messages[number + 1 :],
    ]


KINDS = [(4, letter) for letter in ["", *"zBCORYIUDTMSEcAbPKrp"]]
# To this version, those of streamed and prepared transactions are kinds that it doesn't know.
KINDS += [(1, letter) for letter in ["", *"zBCORYIUDTM"]]


@pytest.mark.parametrize(("version", "letter"), KINDS)
def test_one_skip_is_enough_whatever_a_message_came_as(version, letter):
    """Two where landing stops by the message behind it."""
    whole = (
        FIRST + SECOND
        if version == 4
        else plain(6, described(), row(1)) + SECOND + plain(15, row(2), lsn=950)
    )
    for number in range(len(whole)):
        messages = altered(whole, number, letter)
        asked = skips(messages, whole, version)
        named = bool(asked) and (asked[0].xid, asked[0].raw) == messages[number]
        assert len(asked) <= (1 if named else 2), (number, asked)


@pytest.mark.parametrize(
    "number", [param for param in each_message() if chr(FIRST[param.values[0]][1][0]) not in "RITA"]
)
@pytest.mark.parametrize("letter", ["", "z"])
def test_others_count_whatever_a_skipped_message_came_as(tmp_path, number, letter):
    """What follows it in other transactions lands and is applied."""
    messages = altered(FIRST, number, letter)
    log = write(tmp_path, [messages, SECOND], skips(messages, FIRST, 4), FIRST)
    left = keys(log)
    assert left == [key for key in ALL_KEYS if key in left]
    assert {11, 12} <= set(left)
    if chr(FIRST[number][1][0]) == "S":
        assert {1, 2, 5, 7, 9, 8, 10} <= set(left)


def test_rows_behind_a_relation_that_is_skipped_are_described_by_no_other(tmp_path):
    """By the Relation before it they would be read as something else."""
    again = plain(15, described(BOTH_WAYS), enc.insert(T, ["x", "3"]), lsn=900)
    log = write(
        tmp_path,
        [plain(6, described(), row(1)) + again],
        [unread(plain(6, described(), row(1)) + again, 5)],
    )
    assert keys(log, upto=1) == [1]


def test_a_row_that_nothing_describes_may_be_skipped(tmp_path):
    """With all others of its relation in that batch; it is an error until then."""
    messages = plain(6, row(1), row(2))
    log = write(tmp_path, [messages, SECOND])
    with pytest.raises(DecodeError, match="no Relation message before it"):
        keys(log, upto=1)
    Decisions(Lake(tmp_path.as_uri())).add([quarantined(messages, 1, SKIPPED)])
    assert keys(ChangeLog(Lake(tmp_path.as_uri()), "slot")) == [11, 12]


def test_a_message_has_one_id_wherever_it_is_met():
    """By position, transaction and bytes."""
    one = UnreadMessage.of(16, 7, b"I")
    assert one.id == UnreadMessage.of(16, 7, b"I").landed(3, 4).id
    assert (
        len(
            {
                one.id,
                *(UnreadMessage.of(*of).id for of in ((17, 7, b"I"), (16, 8, b"I"), (16, 7, b"U"))),
            }
        )
        == 4
    )
    assert len(one.id) == 16

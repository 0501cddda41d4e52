"""From messages to events in commit order: streamed, prepared, and by which Relation."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import (
    BOTH_WAYS,
    NARROW,
    TS,
    WIDE,
    T,
    aborted,
    change_log,
    chunk,
    commit,
    decided,
    decoded,
    described,
    events,
    plain,
    plan_of,
    prepared,
    row,
    stream_of,
)
from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.decode.decode import collapse_events
from waldelta.changes.decode.relation_versions import read_versions
from waldelta.changes.decode.route import SAME, SENT, UNKNOWN, Routing
from waldelta.errors import ApplyError, DecodeError
from waldelta.lake.changelog import Snapshot, Transactions
from waldelta.lake.changelog.batch_file import COLUMNS, PreparedRows, TransactionCounts
from waldelta.lake.changelog.change_log import landmarks
from waldelta.metadata_columns import RELID
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type


def test_streamed_rows_come_at_their_commit_with_its_position():
    """A savepoint rolled back leaves nothing; plain rows of others come before."""
    log = change_log(
        chunk(7, described(xid=7), row(1, 7), row(2, 8))
        + plain(9, described(), row(3))
        + aborted(7, 8)
        + chunk(7, row(4, 7))
        + commit(7)
        + plain(10, row(5), lsn=600)
    )
    assert events(log) == [(3, "x", 100), (1, "x", 500), (4, "x", 500), (5, "x", 600)]


def test_a_relation_sent_in_a_streamed_transaction_is_known_to_others_after_its_commit():
    """pgoutput doesn't send it again."""
    log = change_log(chunk(7, described(xid=7), row(1, 7)) + commit(7) + plain(9, row(2), lsn=600))
    assert events(log) == [(1, "x", 500), (2, "x", 600)]


def test_a_prepared_transaction_of_an_earlier_batch_is_described_by_that_batch():
    """Also where a Stream Commit there, long applied, made the relation known."""
    log = change_log(
        chunk(7, described(xid=7), row(1, 7)) + commit(7) + prepared(9, row(2)),
        plain(10, described(BOTH_WAYS), enc.insert(T, ["y", "3"])) + decided(9),
    )
    assert events(log, after=1) == [(3, "y", 100), (2, "x", 700)]


def test_a_change_of_columns_within_a_streamed_transaction_is_its_own():
    """Others are read by the old Relation until the new one has committed."""
    log = change_log(
        plain(5, described(), row(1))
        + chunk(7, described(BOTH_WAYS, xid=7), enc.insert(T, ["a", "2"], xid=7))
        + plain(9, row(3))
        + chunk(7, enc.insert(T, ["b", "4"], xid=7))
        + commit(7)
        + plain(10, enc.insert(T, ["c", "5"]), lsn=600)
    )
    expected = [(1, "x", 100), (3, "x", 100), (2, "a", 500), (4, "b", 500), (5, "c", 600)]
    assert events(log) == expected


def test_a_change_of_columns_that_was_rolled_back_is_forgotten():
    """In a savepoint: the relation comes again. In a whole transaction: others never hear of it."""
    log = change_log(
        chunk(
            7,
            described(xid=7),
            row(1, 7),
            described(BOTH_WAYS, xid=8),
            enc.insert(T, ["a", "2"], xid=8),
        )
        + aborted(7, 8)
        + chunk(7, described(xid=7), row(3, 7))
        + commit(7)
        + plain(9, row(4), lsn=600)
        + chunk(11, described(BOTH_WAYS, xid=11), enc.insert(T, ["a", "5"], xid=11))
        + aborted(11, 11)
        + plain(12, row(6), lsn=700)
    )
    assert events(log) == [(1, "x", 500), (3, "x", 500), (4, "x", 600), (6, "x", 700)]


@pytest.mark.parametrize(
    "messages",
    [
        plain(9, row(1))
        + plain(10, described(), row(2))
        + plain(11, described(BOTH_WAYS), enc.insert(T, ["a", "3"])),
        plain(9, described(), row(1))
        + chunk(7, row(2, 7), described(BOTH_WAYS, xid=7))
        + commit(7),
        prepared(9, described(), row(1))
        + chunk(7, described(BOTH_WAYS, xid=7))
        + chunk(8, row(2, 8))
        + commit(8)
        + commit(7),
    ],
    ids=["before the first", "of another transaction", "of another stream"],
)
def test_a_row_that_nothing_describes_is_an_error(messages):
    """Never left out in silence."""
    with pytest.raises(DecodeError, match=f"no Relation message before it: relation {T}"):
        events(change_log(messages))


def test_a_malformed_message_is_named_with_its_place():
    """Which message of which batch, and its transaction; the change log still has its bytes."""
    cut = row(2)[:-1]
    log = change_log(
        plain(9, described(), row(1), lsn=0x300),
        plain(10, described(), row(1), cut, row(3), lsn=0x500),
    )
    with pytest.raises(DecodeError) as caught:
        events(log)
    where = "message 3 of batch 2, of the transaction committed at 0/500; the change log keeps it"
    assert str(caught.value).startswith(r"malformed Insert message: new[1].length at byte ")
    assert where in str(caught.value)
    assert f"{len(cut)} bytes" in str(caught.value)


def tally(log):
    counted = TransactionCounts(1, landmarks(log))
    for part in log.select(COLUMNS).to_batches(max_chunksize=2):
        counted.add(part)
    return counted.landed()


def test_the_tally_is_the_plain_account_of_a_streamed_batch():
    """Void chunks, rolled back savepoints and transactions of nothing published don't count."""
    log = change_log(
        chunk(7, described(xid=7), row(1, 7), row(2, 8), enc.truncate([T], xid=7))
        + plain(9, described(), row(3), enc.delete(T, key=["1", None]))
        + aborted(7, 8)
        + commit(7, 500)
        + chunk(20)
        + commit(20, 600)
        + chunk(21, described(xid=21), row(4, 21))
        + [(0, enc.message(650, "beat", b"", transactional=False))]
    )
    landed = tally(log)
    assert landed.transactions == Transactions(
        commits=2, inserts=2, deletes=1, truncates=1, xid_sum=16, end_lsn_sum=101 + 501
    )
    assert landed.end_lsn == 650


def test_rows_of_prepared_transactions_are_counted_by_transaction():
    """So that those rolled back meanwhile can be left out of a comparison."""
    log = change_log(
        prepared(9, described(), row(1), row(2), gid="a")
        + chunk(7, described(xid=7), row(3, 7), row(4, 8))
        + aborted(7, 8)
        + [(7, enc.stream_prepare(175, 180, TS, 7, "b"))]
        + decided(9, "a")
        + [(7, enc.rollback_prepared(180, 190, TS, TS, 7, "b"))]
    )
    found = tally(log).transactions
    assert found == Transactions(
        prepares=2,
        prepared_commits=1,
        prepared_rollbacks=1,
        xid_sum=9 + 7 + 9 + 7,
        end_lsn_sum=150 + 180 + 701 + 190,
        in_prepared=(PreparedRows(7, inserts=1), PreparedRows(9, inserts=2)),
    )
    assert found.without({7}).in_prepared == (PreparedRows(9, inserts=2),)


def test_an_unchanged_value_comes_from_the_whole_old_row():
    """By REPLICA IDENTITY FULL a row that enters a filtered target has all values."""
    update = enc.update(T, ["1", enc.UNCHANGED], old=["1", "large"])
    log = change_log(plain(9, described(), update))
    plan = replace(
        plan_of(log),
        numbering=ColumnNumbering(2, (0,), toastable=(1,)),
        routing=Routing((0,), (), "n0 > 0", "p0 > 0"),
    )
    (event,) = decoded(log, plan)
    assert (event["c1"], event["u1"]) == (b"large", False)


def test_what_the_copy_holds_is_not_applied_again():
    """By the copy's snapshot: transactions that ran while it was made, and later ones, are."""
    xids = (9, 11, 12, 19, 20, 21)
    log = change_log([m for xid in xids for m in plain(xid, described(), row(xid))])
    plan = replace(plan_of(log), snapshot=Snapshot.parse("10:20:12,15"))
    assert [int(event["c0"]) for event in decoded(log, plan)] == [12, 20, 21]


def test_a_truncate_discards_earlier_rows_of_its_own_relation():
    """Rows of the other merged partitions stay, however early they came."""
    other = enc.relation(T + 1, "public", "t_2", NARROW)
    log = change_log(
        plain(7, described(), other, row(1), enc.insert(T + 1, ["2", "x"]))
        + plain(8, enc.truncate([T]), row(3))
    )
    stream = stream_of(log)
    ((_, at),) = stream.of_kind("T")
    versions = tuple(read_versions(stream, [T, T + 1]))
    plan = replace(
        plan_of(log), versions=versions, positions=((0, 1), (0, 1)), truncated_at={T: at}
    )
    assert [int(event["c0"]) for event in decoded(log, plan)] == [2, 3]


KEYED_BY_TEXT = [("id", 23, -1, False), ("v", 25, -1, True)]
# Columns, the key's place, one message, and the event: keys, value, whether it is unchanged.
KEYS = {
    "an insert has no old key": (NARROW, 0, row(1), (None, b"1", b"x", False)),
    "an update without an old row stays at its key": (NARROW, 0, enc.update(T, ["1", "x"]),
     (b"1", b"1", b"x", False)),
    "an update of the key has both": (NARROW, 0, enc.update(T, ["2", "x"], key=["1", None]),
     (b"1", b"2", b"x", False)),
    "a whole old row has the old key": (NARROW, 0, enc.update(T, ["2", "x"], old=["1", "y"]),
     (b"1", b"2", b"x", False)),
    "a delete has the old key alone": (NARROW, 0, enc.delete(T, key=["1", None]),
     (b"1", None, None, False)),
    "an unchanged value is not NULL": (NARROW, 0, enc.update(T, ["1", enc.UNCHANGED]),
     (b"1", b"1", None, True)),
    "NULL is not unchanged": (NARROW, 0, enc.update(T, ["1", None]), (b"1", b"1", None, False)),
    "an unchanged key is that of the old row": (KEYED_BY_TEXT, 1,
     enc.update(T, ["2", enc.UNCHANGED], key=[None, "large"]), (b"large", b"large", b"2", False)),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_keys_and_values_of_one_message(case):
    """From the tuples that were sent."""
    columns, key, message, expected = KEYS[case]
    log = change_log(plain(9, described(columns), message))
    plan = replace(plan_of(log), numbering=ColumnNumbering(2, (key,), toastable=(1 - key,)))
    (event,) = decoded(log, plan)
    value = 1 - key
    found = (event["o0"], event[f"c{key}"], event[f"c{value}"], event[f"u{value}"])
    assert found == expected


THREE = (("id", 23, "integer"), ("v", 25, "text"), ("n", 23, "integer"))
# One message, the relation's replica identity and its columns. Of the event: what it says about its
# old row, and the column of the target's filter in the new and in the old row.
JUDGED = {
    "an insert": (enc.insert(T, ["1", "x", "7"]), "d", ["id"], (SAME, 7, None)),
    "an update without an old row": (enc.update(T, ["1", "x", "7"]), "i", ["id", "n"],
     (SAME, 7, None)),
    "an update with its old key": (enc.update(T, ["1", "x", "7"], key=["1", None, "3"]), "i",
     ["id", "n"], (SENT, 7, 3)),
    "an update with a whole old row": (enc.update(T, ["1", "x", "7"], old=["1", "x", "3"]), "f",
     ["id", "v", "n"], (SENT, 7, 3)),
    "a delete whose key says nothing": (enc.delete(T, key=["1", None, None]), "d", ["id"],
     (UNKNOWN, None, None)),
    "a delete with the whole row": (enc.delete(T, old=["1", "x", "3"]), "f", ["id", "v", "n"],
     (SENT, None, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", JUDGED)
def test_what_a_targets_filter_judges(case):
    """The new row, and the old one as far as it was sent."""
    message, identity, key, expected = JUDGED[case]
    columns = [(name, oid, -1, name in key) for name, oid, _ in THREE]
    log = change_log(plain(9, enc.relation(T, "public", "t", columns, identity), message))
    (event,) = decoded(log, filtered_plan(log, 2))
    assert (event["old_row"], event["n2"], event["p2"]) == expected


def test_an_update_whose_old_row_lacks_a_column_of_the_filter_is_refused():
    """One of the two is in the key, so the old row says nothing of the other one."""
    relation = enc.relation(T, "public", "t", WIDE)
    log = change_log(plain(9, relation, enc.update(T, ["1", "x", "7"])))
    with pytest.raises(ApplyError, match="lacks the old values of the columns"):
        decoded(log, filtered_plan(log, 0, 2))


def filtered_plan(log, *filtered):
    """How rows of three columns are decoded for a target with a filter of these columns."""
    types = tuple(target_type(PgType(oid, -1, kind)) for _, oid, kind in THREE)
    return replace(
        plan_of(log),
        numbering=ColumnNumbering(3, (0,)),
        names=tuple(name for name, _, _ in THREE),
        types=types,
        positions=((0, 1, 2),),
        fills=(None,) * 3,
        wire_names=("",) * 3,
        routing=Routing(filtered, (), "", ""),
    )


def test_a_truncate_of_a_leaf_empties_none_of_the_others():
    """Of merged partitions: an update there still finds its row in the target."""
    other = enc.relation(T + 1, "public", "t_2", NARROW)
    log = change_log(
        plain(7, described(), other, enc.truncate([T]))
        + plain(8, enc.update(T, ["1", "x"]), enc.update(T + 1, ["2", "x"]))
    )
    stream = stream_of(log)
    ((_, at),) = stream.of_kind("T")
    plan = replace(
        plan_of(log),
        versions=tuple(read_versions(stream, [T, T + 1])),
        numbering=ColumnNumbering(3, (0,)),
        names=("id", "v", RELID),
        types=(*plan_of(log).types, target_type(PgType(20, -1, "bigint"))),
        positions=((0, 1, None), (0, 1, None)),
        fills=(None,) * 3,
        wire_names=("",) * 3,
        relid=2,
        truncated_at={T: at},
    )
    found = pa.Table.from_pylist(decoded(log, plan), plan.event_schema)
    net = collapse_events(found, plan).to_pylist()
    assert sorted((row["action"], row["c0"], row["c2"]) for row in net if row["c0"]) == [
        ("update", 2, T + 1)
    ]

"""What becomes of discarded rows by later changes, and what messages say of missing values."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import T, change_log, chunk, commit, described, plain, plan_of, row
from waldelta.lake import Lake, write_parquet
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import SentMessage
from waldelta.stages.apply.complete_rows import discarded_since, keep_bytes, sent_messages

CASES = {
    "not touched": ([("update", 2, 2)], set(), {}),
    "changed": ([("update", 1, 1)], set(), {}),
    "deleted": ([("delete", 1, None)], {1}, {}),
    "left empty": ([("purge", 1, None)], {1}, {}),
    "another row at its key": ([("upsert", 1, 1)], {1}, {}),
    "another row that moves to its key": ([("update", 2, 1)], {1}, {}),
    "moved": ([("update", 1, 9)], {1}, {1: 9}),
    "moved, and another row at its key": ([("update", 1, 9), ("insert", None, 1)], {1}, {1: 9}),
    "moved to the key of one that is gone": ([("update", 1, 5)], {1, 5}, {1: 5}),
    "both moved": ([("update", 1, 5), ("update", 5, 1)], {1, 5}, {1: 5, 5: 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_discarded_rows(case, tmp_path):
    """The rows 1 and 5; as net changes with base key and present key."""
    changes, resolved, moved = CASES[case]
    decode = plan_of(change_log(plain(7, described())))
    folder = (tmp_path / "net").as_uri()
    rows = [{"action": action, "b0": base, "c0": key} for action, base, key in changes]
    write_parquet(folder, pa.Table.from_pylist(rows, schema=decode.net_schema))
    keys = {n: f'{{"id": "{n}"}}' for n in (1, 5, 9)}
    found = discarded_since(
        SimpleNamespace(folder=folder), SimpleNamespace(decode=decode), [keys[1], keys[5]]
    )
    expected = ({keys[n] for n in resolved}, {keys[old]: keys[new] for old, new in moved.items()})
    assert found == expected
    assert discarded_since(None, SimpleNamespace(decode=decode), []) == (set(), {})


def moved(old, new, value="x"):
    return enc.update(T, [str(new), value], key=[str(old), None])


def changed(key, value):
    return enc.update(T, [str(key), value])


def deleted(key):
    return enc.delete(T, [str(key), None])


def test_the_messages_of_each_row(lake):
    """Back to its INSERT, through other keys; of another row at the key nothing."""
    log = change_log(
        [
            *plain(
                7,
                described(),
                row(1),
                row(2),
                row(3),
                changed(1, "y"),
                moved(1, 11),
                changed(2, "y"),
                deleted(3),
                row(3),
            ),
            *chunk(9, described(xid=9), row(5, xid=9)),
            *plain(8, moved(11, 1), moved(2, 12), moved(4, 2), deleted(6)),
            *commit(9),
        ],
        [*plain(10, described(), changed(1, "z"), changed(5, "y"))],
    )
    logged = ChangeLog(Lake(lake), "slot")
    write_deltalake(logged.uri, log, partition_by=["batch"])
    data = {(at["batch"], at["seq"]): at for at in log.to_pylist()}
    plan = SimpleNamespace(decode=plan_of(log), state=SimpleNamespace(relation_ids=[T]))
    keys = {f'{{"id": "{n}"}}': n for n in (1, 2, 3, 5, 12, 99)}
    found = {keys[key]: messages for key, messages in sent_messages(logged, plan, keys).items()}
    for messages in found.values():
        for one in messages:
            at = data[one.batch, one.seq]
            assert one == SentMessage(one.batch, one.seq, at["lsn"], at["xid8"], at["data"])
    order = {
        n: [(message.batch, message.seq) for message in messages] for n, messages in found.items()
    }
    # 4 was the target's before; 5 was streamed, and committed behind the others.
    assert order == {
        1: [(1, 2), (1, 5), (1, 6), (1, 16), (2, 2)],
        2: [(1, 18)],
        3: [(1, 9)],
        5: [(1, 13), (2, 3)],
        12: [(1, 3), (1, 7), (1, 17)],
    }
    assert sent_messages(logged, plan, []) == {}


def test_of_a_row_that_was_changed_often_the_newest_bytes_are_kept():
    """And of the others where they stand."""
    messages = [
        SentMessage(1, n, n, 9, bytes(size))
        for n, size in enumerate([10, 700_000, 400_000, 600_000, 5_000_000])
    ]
    kept = keep_bytes(messages)
    assert [message.seq for message in kept] == [0, 1, 2, 3, 4]
    expected = [None, None, 400_000, 600_000, 5_000_000]
    assert [None if message.raw is None else len(message.raw) for message in kept] == expected

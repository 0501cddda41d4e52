"""On a master that repeats failed tasks: a dead process is replaced, an error reported once."""

import os
import signal

import pyarrow as pa
import pytest
from pyspark import TaskContext

from tests.support.pipelines import pipeline_file
from waldelta.errors import ApplyError, PeekTimeout, SlotInUse, TargetNotWritable
from waldelta.lsn import Lsn
from waldelta.slot.read.peek import PeekBound
from waldelta.stages.land.drain import land

pytestmark = pytest.mark.usefixtures("on_spark")

TOLD = pa.schema([("number", pa.int64())])
ERRORS = {
    "a statement timeout": (
        PeekTimeout("reading slot 's' took longer than the statement timeout"),
        PeekTimeout,
    ),
    "a slot in use": (SlotInUse("slot 's' is being read by another process: x"), SlotInUse),
    "a full disk": (OSError(28, "No space left on device"), TargetNotWritable),
}


@pytest.mark.parametrize("err, kind", ERRORS.values(), ids=ERRORS)
def test_a_bite_that_fails_is_peeked_once(runner, lake, tmp_path, err, kind):
    """The run takes a smaller window; four attempts would read the same WAL for nothing."""
    note, told = tmp_path / "peeks", str(err)

    class ChangeLog:
        uri = lake

        def write(self, *_):
            with note.open("a") as file:
                file.write("x")
            raise type(err)(*err.args)

    source = pipeline_file(lake, "s").source
    with pytest.raises(
        kind,
        match=told.split(": ", maxsplit=1)[0] if kind is not TargetNotWritable else "No space left",
    ):
        land(runner, "", source, PeekBound(Lsn(1), None, 1.0, 1), ChangeLog(), 1)
    assert note.read_text() == "x"


def test_an_error_of_a_task_is_told_once(runner, tmp_path):
    def task(number):
        with (tmp_path / str(number)).open("a") as file:
            file.write("x")
        if number == 1:
            raise ApplyError("column a: too large")
        return pa.table({"number": [number]}, TOLD)

    with pytest.raises(ApplyError, match="column a: too large"):
        runner.run(3, TOLD, task)
    assert (tmp_path / "1").read_text() == "x"


def test_a_task_whose_process_died_is_done_again(runner):
    def task(number):
        if number == 1 and TaskContext.get().attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return pa.table({"number": [number]}, TOLD)

    assert sorted(row["number"] for row in runner.run(3, TOLD, task)) == [0, 1, 2]

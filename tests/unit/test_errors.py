"""What an error says is shown without values of rows."""

import io
import logging

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake.exceptions import DeltaError

from waldelta.cli.command_line import _Formatter
from waldelta.errors import without_values
from waldelta.lake.write_errors import store_text
from waldelta.pipeline import describe_error, unexpected_error
from waldelta.pipeline.task_errors import writing_error

SECRET = "s3cret-4711"
CAST = f"""\
[CAST_INVALID_INPUT] The value '{SECRET}' of the type "STRING" cannot be cast to "INT" because it \
is malformed. Use `try_cast` to tolerate malformed input. SQLSTATE: 22018
== SQL (line 1, position 8) ==
select cast(`odd name` as int) from delta.`/lake/t`
"""
JVM = f"""\
An error occurred while calling o42.sql.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed: \
org.apache.spark.SparkNumberFormatException: {CAST}
\tat org.apache.spark.sql.errors.QueryExecutionErrors
"""


def raised(call) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the library raises
        call()
    return caught.value


def arrow(values, kind):
    return raised(lambda: pc.cast(pa.array(values), kind))


NAMED = "[CAST_INVALID_INPUT] SQLSTATE: 22018"
# What each says without the value.
ERRORS = {
    "Spark": (RuntimeError(CAST), f"{NAMED} in an expression of odd name"),
    "Spark's JVM": (RuntimeError(JVM), NAMED),
    "Arrow: a text": (arrow([SECRET], pa.int32()), "parse string: … as a scalar of type int32"),
    "Arrow: quotes": (arrow([f"it's {SECRET} 'x'"], pa.int32()), "as a scalar of type int32"),
    "Arrow: lines": (arrow([f"a\n{SECRET}"], pa.int32()), "as a scalar of type int32"),
    "Arrow: a number": (arrow([4711], pa.int8()), "Integer value … not in range"),
    "Arrow: a time": (arrow(["4711-01-01x"], pa.timestamp("us")),
     "as a scalar of type timestamp[us]"),
    "Python: float": (raised(lambda: float(SECRET)), "could not convert string to float: …"),
    "Python: int": (raised(lambda: int(SECRET)), "invalid literal for int() with base …"),
    "Python: a key": (raised(lambda: {}[SECRET]), "…"),
    "delta-rs": (
        DeltaError(f"Invariant violations: Check (v > 0) violated by value in row: [{SECRET}]"),
        "Check (v > 0) violated by value in row: …",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("err", "words"), ERRORS.values(), ids=ERRORS)
def test_no_value_of_a_row(err, words):
    """In results of runs, in errors of tables, and in the stack that the log shows."""
    said = [
        without_values(err),
        describe_error(err)["message"],
        str(unexpected_error("public.t", err)),
        str(writing_error("public.t", err)),
    ]
    for text in said:
        assert words in text
        assert SECRET not in text
        assert "4711" not in text
    assert SECRET not in store_text(err) or "delta" not in type(err).__module__


KEPT = {
    "a file": pa.ArrowInvalid("Could not open Parquet input source 'part-1.parquet': too small"),
    "a system error": FileNotFoundError(2, "No such file or directory", "/lake/t/part-1.parquet"),
    "a name": RuntimeError("[UNRESOLVED_COLUMN] A column `vv` cannot be resolved. SQLSTATE: 42703"),
    "our own": RuntimeError("[USER_RAISED_EXCEPTION] waldelta: division by zero SQLSTATE: P0001"),
}


@pytest.mark.parametrize("err", KEPT.values(), ids=KEPT)
def test_what_names_no_value_stays(err):
    assert without_values(err) == str(err)


def test_the_log_shows_a_stack_without_values():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter("%(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        float(SECRET)
    except ValueError:
        logger.exception("table=%s", "public.t")
    assert "test_errors.py" in stream.getvalue()
    assert "builtins.ValueError: could not convert string to float: …" in stream.getvalue()
    assert SECRET not in stream.getvalue()

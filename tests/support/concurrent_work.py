"""What happens while a run works: during its copy, in a Connect server, or a kill."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.waiting import wait_until
from waldelta.stages.sync._write import write_copy


def before_rows(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have each copy do this first, with its snapshot taken and its chunks planned."""

    def write(*given: Any) -> Any:
        action()
        return write_copy(*given)

    monkeypatch.setattr("waldelta.stages.sync.copy_table.write_copy", write)


@contextmanager
def insert_that_goes_on(spark: SparkSession, uri: str, folder: Path) -> Iterator[None]:
    """An INSERT of all rows of a target, begun before what is within and about to commit after it;
    fails unless it is refused.

    It reads nothing of the target, so that nothing but the target's properties can conflict with
    it.
    """
    begun, over, staged = folder / "begun", folder / "over", str(folder / "staged")
    spark.read.format("delta").load(uri).coalesce(1).write.parquet(staged)
    source = spark.read.parquet(staged)

    def until_over(batches):
        begun.touch()
        wait_until(over.exists, timeout_s=120)
        yield from batches

    late = source.mapInArrow(until_over, source.schema)
    with ThreadPoolExecutor(1) as pool:
        insert = pool.submit(lambda: late.write.format("delta").mode("append").save(uri))
        try:
            wait_until(begun.exists)
            yield
        finally:
            over.touch()
        with pytest.raises(Exception, match="DELTA_METADATA_CHANGED"):
            insert.result()


class Killed(BaseException):
    """What a kill is to the process."""


@contextmanager
def killed_in(function: str) -> Iterator[None]:
    """Have the block killed where it calls this function, named by its module."""

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, kill)
        with pytest.raises(Killed):
            yield


@contextmanager
def killed_at(
    step: str, module: str, passes: int = 1, error: type[BaseException] = Killed
) -> Iterator[None]:
    """Have the block killed where it passes this fault point of a module so often."""
    passed = itertools.count(1)

    def at(reached: str) -> None:
        if reached == step and next(passed) == passes:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.fault_point", at)
        with pytest.raises(error):
            yield

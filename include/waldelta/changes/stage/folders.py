"""Folders of staged changes, and what becomes of them when the statements that read them are
over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waldelta.lake.storage import remove_folder
from waldelta.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@contextmanager
def staged_in(spark: SparkSession, *folders: str) -> Iterator[None]:
    """Remove the folders in the end, unless a statement that reads them may go on: whoever comes
    next then learns of it by them.

    A Spark Connect server goes on with what it was told when its client is interrupted, or loses
    it.
    """
    try:
        yield
    except BaseException as err:
        if is_connect(spark) and _may_go_on(err):
            log.warning(
                "a statement may still read what is staged, which the next run removes: %s",
                folders[0],
            )
        else:
            _remove(folders)
        raise
    _remove(folders)


def _may_go_on(err: BaseException) -> bool:
    """Whether nobody knows how the statement ended; an error of its own, and the client's, say that
    it has.
    """
    if not isinstance(err, Exception):  # it was interrupted
        return True
    # The server's answer has a class of its own; these are of the way there, or of an operation
    # that was given up.
    is_unanswered = type(err).__name__ in (
        "SparkConnectException",
        "SparkConnectGrpcException",
        "RetriesExceeded",
    )
    return is_unanswered or "INVALID_HANDLE" in str(err) or "OPERATION_CANCELED" in str(err)


def _remove(folders: tuple[str, ...]) -> None:
    for folder in folders:
        remove_folder(folder)

"""Folders of staged changes, and what becomes of them when the statements that read them are over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_jobs.session import is_connect
from waldelta.errors import WaldeltaError
from waldelta.lake import remove_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@contextmanager
def staged_in(spark: SparkSession, *folders: str) -> Iterator[None]:
    """Remove the folders in the end, unless a statement that reads them may go on: whoever comes next then learns of it by them.

    A Spark Connect server goes on with what it was told when its client is interrupted, or loses it; an error with a name is
    the statement's own, or came before it.
    """
    try:
        yield
    except WaldeltaError:
        _remove(folders)
        raise
    except BaseException:
        if is_connect(spark):
            log.warning(
                "what is staged stays, since a statement may still read it, for the next run to remove: %s", folders[0]
            )
        else:
            _remove(folders)
        raise
    _remove(folders)


def _remove(folders: tuple[str, ...]) -> None:
    for folder in folders:
        remove_folder(folder)

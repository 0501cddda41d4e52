"""Folders of staged changes, and their removal after the statements that read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from waldelta.lake import remove_folder
from waldelta.server_errors import texts
from waldelta.spark import Runner

log = logging.getLogger(__name__)


@contextmanager
def staged_in(runner: Runner, *folders: str) -> Iterator[None]:
    """Remove the folders at the end, unless a statement that reads them may still run.

    The next run then finds the folders, and knows of that statement. A Spark Connect server
    continues a statement when its client is interrupted, or loses the connection.
    """
    try:
        yield
    except BaseException as err:
        if runner.is_connect and _may_go_on(err):
            log.warning(
                "keeping staged files that a statement may still read; the next run removes them:"
                " %s",
                folders[0],
            )
        else:
            _remove(folders)
        raise
    _remove(folders)


def _may_go_on(err: BaseException) -> bool:
    """Returns whether it isn't known how the statement ended.

    Its own error, or one of the client's, shows that it has ended.
    """
    if not isinstance(err, Exception):  # A signal interrupted the statement.
        return True
    # The server's answer has a class of its own. These classes mean a failed connection, or an
    # abandoned operation.
    is_unanswered = type(err).__name__ in (
        "SparkConnectException",
        "SparkConnectGrpcException",
        "RetriesExceeded",
    )
    return is_unanswered or texts.OPERATION_ABANDONED.search(str(err)) is not None


def _remove(folders: tuple[str, ...]) -> None:
    for folder in folders:
        remove_folder(folder)

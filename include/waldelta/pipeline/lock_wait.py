"""Waits for locks of other runs while holding none: a run, or one of its stages, begins again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

from waldelta.errors import LockHeld, WaldeltaError

T = TypeVar("T")
log = logging.getLogger(__name__)

_PAUSE_S: Final = 5.0


def waiting_for_locks(
    seconds: float, attempt: Callable[[], T], note: Callable[[str], None] = lambda _: None
) -> T:
    """Return the result of an attempt, which begins again while only locks of other runs stop it.

    The session of a waiting attempt is closed, so it holds back neither vacuum nor a new slot, and
    it has no lock for which another run may wait. After ``seconds`` the error is raised. ``note``
    is called with each reason to wait.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        err = state.outcome.exception() if state.outcome is not None else None
        left = seconds - (state.seconds_since_start or 0.0)
        log.info("waiting for another run, for at most %.0f s more: %s", left, err)
        note(str(err))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_of_locks),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_fixed(_PAUSE_S),
        before_sleep=before_sleep,
        reraise=True,
    )
    return retrying(attempt)


def is_of_locks(err: BaseException) -> bool:
    """Return whether locks of other runs are the only reason of an error."""
    if isinstance(err, LockHeld):
        return True
    causes = err.causes if isinstance(err, WaldeltaError) else ()
    return bool(causes) and all(map(is_of_locks, causes))

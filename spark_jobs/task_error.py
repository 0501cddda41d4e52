"""Named errors that come back from Spark's tasks as text: inside a JVM stack trace, or over Connect."""

from __future__ import annotations

import re

from waldelta import errors

# As Python prints an exception: qualified class, colon, message. Tasks keep theirs to one line.
_NAMED = re.compile(r"waldelta\.errors\.(\w+): ([^\n]+)")


def named_error(err: BaseException) -> errors.WaldeltaError | None:
    """The error that a task raised, if it is one of ours."""
    for name, message in _NAMED.findall(str(err)):
        kind = getattr(errors, name, None)
        if kind is errors.DecodeError and (read := errors.DecodeError.parse(message.strip())) is not None:
            return read
        if isinstance(kind, type) and issubclass(kind, errors.WaldeltaError):
            try:
                return kind(message.strip())
            except TypeError:  # an error with a structure of its own keeps its text at least
                return errors.WaldeltaError(f"{name}: {message.strip()}")
    return None


def first_line(err: BaseException) -> str:
    """What an exception of the JVM says, without its stack trace."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return type(err).__name__
    told = next((line for line in lines[1:3] if line.startswith(": ")), lines[0])
    return told.removeprefix(": ")

"""One result of ``doctor``, and how each check is run: with a time limit, and never a stack trace.

This module, and the checks of the installation, import no other package: they also run where one is
missing or broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from waldelta.error_catalog import REMEDIES
from waldelta.errors import WaldeltaError

CHECK_TIMEOUT_S = 10.0

CheckStatus = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found; ``remedy`` says what to do, where the text doesn't."""

    check: str
    status: CheckStatus
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by their names."""
        return asdict(self)


Check = Callable[[], Iterable[CheckResult]]


def run_check(name: str, check: Check, timeout_s: float = CHECK_TIMEOUT_S) -> list[CheckResult]:
    """Run a check; an error becomes a problem, and so does a check that takes too long.

    A check that takes too long is left to its thread, which ends with the process.
    """
    found: list[CheckResult] = []
    thread = threading.Thread(target=_collect, args=(name, check, found), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive():
        return found
    late = CheckResult(
        name,
        "problem",
        f"no answer within {timeout_s:g} s",
        "see that host and port are right, and that no firewall drops packets; run doctor again",
    )
    return [*found, late]


def _collect(name: str, check: Check, found: list[CheckResult]) -> None:
    try:
        found.extend(check())
    except WaldeltaError as err:
        found.append(problem_of(name, err))
    except Exception as err:
        # Only the first line: what follows may repeat a request with its signature.
        line = str(err).strip().partition("\n")[0]
        text = f"{type(err).__name__}: {line}" if line else type(err).__name__
        found.append(CheckResult(name, "problem", text))


def problem_of(name: str, err: WaldeltaError) -> CheckResult:
    """Returns a named error as a problem, with its remedy of errors.md."""
    kind = type(err).__name__
    return CheckResult(name, "problem", f"{kind}: {err}", REMEDIES.get(kind, ""))

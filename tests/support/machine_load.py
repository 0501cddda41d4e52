"""How much of the machine a test has to itself, for limits on the clock that must hold beside other
tests too.
"""

from __future__ import annotations

import psutil


def times_longer() -> float:
    """How many times longer work takes on processors that so many processes wanted in the last
    minute; 1 on a quiet machine.
    """
    return max(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1))

"""How much longer work takes here and now than on the machine that the tests' limits are for."""

import subprocess
import sys
from functools import cache

import psutil

# CPU seconds of a new process that imports pandas on a machine of usual speed.
_IMPORT_S = 0.5
_IMPORT = "import pandas, time; print(time.process_time())"


def times_longer() -> float:
    """How many times longer work takes now; 1 on a quiet machine of usual speed."""
    slower = max(1.0, pandas_import_s() / _IMPORT_S)
    return max(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1)) * slower


@cache
def pandas_import_s() -> float:
    """Return the seconds of CPU that a new process takes to import pandas: the machine's speed."""
    imported = [
        subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True, text=True)
        for _ in range(3)
    ]
    return min(float(done.stdout) for done in imported)

"""What Spark's JVM prints is no part of a verb's result."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from waldelta.spark.session import _stdout_as_stderr
with _stdout_as_stderr():
    os.system("echo Deleted 0 files and directories in a total of 1 directories.")
print("result")
"""


def test_a_process_that_a_session_starts_prints_to_stderr():
    """Delta's VACUUM says there what it deleted; stdout has the JSON of the verb alone."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "result\n"
    assert "Deleted 0 files" in done.stderr

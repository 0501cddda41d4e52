"""What README and make up show of reading the lake is the same, and runs as it is printed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from benchmarks.verify import delta_extension
from demo.stack.__main__ import READERS

pytestmark = pytest.mark.spark
SPARK_ALONE = pytest.mark.nightly("a JVM of its own")
README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
PROGRAMS = [
    text
    for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    if "/lake/public/flights" in text
]


def test_make_up_prints_what_readme_shows():
    """But for line breaks, which make up has no room for."""
    printed = [text.format(table=".waldelta/lake/public/flights") for text in READERS.values()]
    assert [ast.dump(ast.parse(text)) for text in printed] == [
        ast.dump(ast.parse(text)) for text in PROGRAMS
    ]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(text, id=name, marks=[] if name != "Spark" else SPARK_ALONE)
        for name, text in zip(READERS, PROGRAMS, strict=True)
    ],
)
def test_the_lake_is_read_as_readme_shows(program, tmp_path):
    write_deltalake(
        tmp_path / ".waldelta/lake/public/flights", pa.table({"origin": ["JFK", "EWR", "JFK"]})
    )
    # DuckDB keeps its extensions below HOME. What is there isn't fetched from DuckDB's server.
    duckdb.connect(config={"home_directory": str(tmp_path)}).install_extension(delta_extension())
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = dict(re.findall(r"\b(JFK|EWR)\b\D+(\d+)", done.stdout))
    assert counts == {"JFK": "2", "EWR": "1"}, done.stdout

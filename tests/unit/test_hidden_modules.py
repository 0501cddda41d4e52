"""Hidden modules: absent for the block's imports, found by everybody else."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from waldelta.hidden_modules import hidden

# What Arrow does with pandas' values after it has looked for pandas in vain.
LATER = """
import waldelta.__main__
waldelta.__main__._load_arrow()
import sys, pyarrow as pa
assert "pandas" not in sys.modules
import pandas as pd
print(pa.table({"a": [1, None], "b": ["x", "y"]}).to_pandas().to_dict("list"))
print(pa.Table.from_pandas(pd.DataFrame({"a": [1.5, None]}), preserve_index=False).to_pydict())
"""


def test_a_block_hides_modules_from_its_own_thread():
    def load() -> str:
        sys.modules.pop("colorsys", None)
        import colorsys

        return colorsys.__name__

    with hidden("colorsys"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(load).result() == "colorsys"
        sys.modules.pop("colorsys")
        with pytest.raises(ModuleNotFoundError, match="colorsys isn't needed here"):
            load()
    assert load() == "colorsys"


def test_pandas_works_with_an_arrow_that_was_loaded_without_it():
    done = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "{'a': [1.0, nan], 'b': ['x', 'y']}",
        "{'a': [1.5, None]}",
    ]

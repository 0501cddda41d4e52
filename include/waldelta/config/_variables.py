"""Environment variables in a pipeline file: which ones it may use, and their values in its texts.

Airflow's API server and DAG processor read pipeline files too, and their environment holds keys and
passwords.
"""

from __future__ import annotations

import os
import re

VARIABLE_PREFIX = "WALDELTA_"
# Other variables that the operator lets pipeline files use, separated by commas.
ALLOWED_VARIABLES = "WALDELTA_ALLOWED_VARIABLES"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(text: str) -> str:
    """Replace each ``${NAME}`` by the variable's value; raises ValueError for one that isn't set,
    or isn't for pipeline files.
    """
    return _VARIABLE.sub(_value, text)


def _value(variable: re.Match[str]) -> str:
    name = variable.group(1)
    allowed = {one.strip() for one in os.environ.get(ALLOWED_VARIABLES, "").split(",")}
    if not name.startswith(VARIABLE_PREFIX) and name not in allowed:
        raise ValueError(
            f"environment variable {name} isn't for pipeline files: use one whose name begins with"
            f" {VARIABLE_PREFIX}, or list {name} in {ALLOWED_VARIABLES} where Airflow and the jobs"
            " run"
        )
    if not (value := os.environ.get(name)):
        raise ValueError(
            f"environment variable {name} is not set: set it to the URI it stands for, or write the"
            " URI here"
        )
    return value

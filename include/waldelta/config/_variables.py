"""Environment variables in a pipeline file: which ones are allowed, and their replacement in texts.

Airflow's API server and DAG processor read pipeline files too, and their environment contains keys
and passwords.
"""

from __future__ import annotations

import os
import re

VARIABLE_PREFIX = "WALDELTA_"
# Names other variables that the operator allows in pipeline files, separated by commas.
ALLOWED_VARIABLES = "WALDELTA_ALLOWED_VARIABLES"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(text: str) -> str:
    """Replace each ``${NAME}`` by the variable's value.

    Raises ValueError for a variable that isn't set, or isn't allowed in pipeline files.
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

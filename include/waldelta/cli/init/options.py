"""The options of init, and how lists of names are written on a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

# A quoted name may contain commas.
_LISTED = re.compile(r'(?:"[^"]*(?:"|$)|[^",])+')


def split_names(text: str) -> list[str]:
    """Returns the names of a list.

    >>> split_names('public.a, "odd,name".b')
    ['public.a', '"odd,name".b']
    """
    return [part for part in (item.strip() for item in _LISTED.findall(text)) if part]


_NAMES = {"type": split_names, "metavar": "NAME,NAME"}
INIT_OPTIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "conn": {
            "metavar": "CONN",
            "help": (
                "id of the Airflow connection of the source; outside Airflow the variable"
                " AIRFLOW_CONN_<CONN_ID> has its URI"
            ),
        },
        "--output": {
            "type": Path,
            "metavar": "FILE",
            "help": "the pipeline file to write, <pipeline>.yml by default; the SQL is next to it",
        },
        "--tables": _NAMES | {"help": "replicate these tables, as schema.table"},
        "--schema": _NAMES | {"help": "replicate the tables of these schemas"},
        "--root": {
            "metavar": "URL",
            "help": "URI of the lake's folder; by default the folder lake in the working directory",
        },
        "--pipeline": {
            "metavar": "NAME",
            "help": "name of the pipeline; by default the database's",
        },
        "--yes": {
            "action": "store_true",
            "help": "replicate all tables and ask nothing, like --tables and --schema do",
        },
    }
)

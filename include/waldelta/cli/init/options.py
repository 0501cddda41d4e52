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


# ``--tables`` is the same for all verbs.
INIT_OPTIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "conn": {"metavar": "CONN", "help": "id of the source's Airflow connection"},
        "--output": {
            "type": Path,
            "metavar": "FILE",
            "help": (
                "pipeline file to write, <pipeline>.yml by default; the file with the suffix .sql"
                " gets the owner's SQL"
            ),
        },
        "--schema": {
            "type": split_names,
            "metavar": "NAME,NAME",
            "help": "take all tables of these schemas",
        },
        "--where": {
            "metavar": "SQL",
            "help": "row filter of the one table that --tables names",
        },
        "--root": {
            "metavar": "URL",
            "help": "lake's folder as a URI, ./lake by default",
        },
        "--pipeline": {"metavar": "NAME", "help": "pipeline's name, the database's by default"},
        "--sql": {
            "type": Path,
            "metavar": "FILE",
            "help": "only write the SQL of this pipeline file again, after you have edited it",
        },
        "--yes": {"action": "store_true", "help": "take all tables and ask nothing"},
    }
)

"""The names that targets have in the lake: the pipeline file's template, and single targets' own.

A target is identified by its name under ``target.tables``, everywhere. The name in the lake decides
only where its folder is, and what a catalog calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter

from waldelta.config.parse_text import refuse_if
from waldelta.config.source import split_table_name

DEFAULT_TEMPLATE = "{schema}.{table}"
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")
# What file systems, object stores, Spark and catalogs take in a name.
_LITERAL = re.compile(r"[\w-]*")
_PLACEHOLDERS = ("schema", "table")


def _quote_part(part: str) -> str:
    if _PLAIN.fullmatch(part):
        return part
    return '"' + part.replace('"', '""') + '"'


def check_template(template: str, *, needs_table: bool) -> str:
    """Returns a template of names; raises ValueError for another text.

    >>> check_template("raw.{schema}_{table}", needs_table=True)
    'raw.{schema}_{table}'
    """
    parts = template.split(".")
    refuse_if(
        len(parts) > 2 or not all(parts),
        f"{template!r} is no name of a target: write table or schema.table, with one dot between"
        " them",
    )
    try:
        pieces = [piece for part in parts for piece in Formatter().parse(part)]
    except ValueError:
        pieces = [("{", "", "", None)]
    fields = [(name, spec, conversion) for _, name, spec, conversion in pieces if name is not None]
    refuse_if(
        any(name not in _PLACEHOLDERS or spec or conversion for name, spec, conversion in fields),
        f"{template!r} has a brace that isn't part of {{schema}} or {{table}}: those are the only"
        " ones that are replaced",
    )
    unfit = sorted({char for text, *_ in pieces for char in _LITERAL.sub("", text)})
    refuse_if(
        unfit,
        f"{template!r} has {''.join(unfit)!r}, which catalogs refuse in names: use letters, digits,"
        " _ and -",
    )
    refuse_if(
        needs_table and "table" not in {name for name, *_ in fields},
        f"{template!r} gives all tables the same name: put {{table}} into it",
    )
    return template


@dataclass(frozen=True, slots=True)
class TargetNames:
    """Names of targets in the lake: by a template, or by a target's own, which is one as well."""

    template: str = DEFAULT_TEMPLATE
    own: Mapping[str, str] = field(default_factory=dict)

    def of(self, table_name: str) -> str:
        """Returns a target's name in the lake, as SQL writes it; a template without a schema keeps
        the target's.

        >>> TargetNames("{schema}_{table}").of('public."Odd name"')
        'public."public_Odd name"'
        >>> TargetNames("raw.{table}", {"public.a": "b"}).of("public.a")
        'public.b'
        """
        template = self.own.get(table_name, self.template)
        if template == DEFAULT_TEMPLATE:
            return table_name
        schema, table = split_table_name(table_name)
        segments = [part.format(schema=schema, table=table) for part in template.split(".")]
        return ".".join(map(_quote_part, segments if len(segments) > 1 else [schema, *segments]))

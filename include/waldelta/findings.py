"""Preflight's findings: problems refuse setup, warnings have figures.

Grants: the SQL statements that give a role its missing privileges, ready to paste.

Preflight and runs find missing privileges one object at a time; this module makes one statement per
privilege of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Lack = Literal["privilege", "ownership"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of preflight; a ``problem`` refuses setup.

    ``lacks``: the role lacks a privilege for its own work (``privilege``), or one that only
    changing publications needs (``ownership``), which a DBA who runs the plan's SQL has. ``needs``
    are the statements that grant it to the role; none where only a superuser has it.
    """

    severity: Literal["problem", "warning"]
    text: str
    lacks: Lack | None = None
    needs: tuple[Need, ...] = ()

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


def problem(text: str) -> Finding:
    """Returns a finding that refuses setup."""
    return Finding("problem", text)


def problem_if(condition: object, text: str) -> tuple[Finding, ...]:
    """Returns a problem if something was found, or a condition holds."""
    return (problem(text),) if condition else ()


def warning_if(condition: object, text: str) -> tuple[Finding, ...]:
    """Returns a warning if something was found, or a condition holds."""
    return (warning(text),) if condition else ()


def lacking(text: str, *needs: Need) -> Finding:
    """Returns a finding that refuses setup: the role lacks privileges for the pipeline's own
    work.
    """
    return Finding("problem", text, "privilege", needs)


def owning(text: str, *needs: Need) -> Finding:
    """Returns a finding that refuses setup by this role: the change needs an owner, or a DBA."""
    return Finding("problem", text, "ownership", needs)


def warning(text: str) -> Finding:
    """Returns a finding of severity "warning", which doesn't stop setup."""
    return Finding("warning", text)


def merge_privileges(
    findings: Iterable[Finding], role: str, *, for_dba: bool = False
) -> list[Finding]:
    """Returns the findings with one, with a single list of grants, for all missing privileges.

    ``for_dba``: without findings that the plan's SQL, run by a DBA, resolves.
    """
    other_findings: list[Finding] = []
    lacks: dict[Lack, list[Finding]] = {"privilege": [], "ownership": []}
    for finding in findings:
        # A lake that can't be written is a missing permission too, but no SQL statement grants it.
        if finding.lacks is None or (finding.lacks == "privilege" and not finding.needs):
            other_findings.append(finding)
        else:
            lacks[finding.lacks].append(finding)
    lacking_privileges, owners = lacks["privilege"], [] if for_dba else lacks["ownership"]
    if not lacking_privileges and not owners:
        return other_findings
    parts = []
    if lacking_privileges:
        parts.append(
            f"role {role} lacks privileges; let the objects' owner, or a superuser,"
            f" run:\n{_list_statements(role, lacking_privileges)}"
        )
    if owners:
        what = "; ".join(dict.fromkeys(finding.text for finding in owners))
        # If one part can't be granted, granting the others doesn't let the role run setup.
        own_it = (
            f"\nor, to let this role run setup itself:\n{_list_statements(role, owners)}"
            if all(finding.needs for finding in owners)
            else ""
        )
        parts.append(
            f"role {role} may not make the planned changes ({what}): let the owner, or a DBA, run"
            f" the SQL that setup --sql prints, or run setup as a role that only sets up{own_it}"
        )
    return [
        *other_findings,
        Finding("problem", "\n".join(parts), "privilege" if lacking_privileges else "ownership"),
    ]


def _list_statements(role: str, findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"    {line}"
        for line in statements(role, (need for finding in findings for need in finding.needs))
    )


PLAIN_NAME = re.compile(r"\A[a-z_][a-z0-9_$]*\Z")
# Names that SQL reserves, or takes for a function or type where a name is alone (pg_get_keywords():
# R, T and C).
_RESERVED = frozenset(
    """
    all analyse analyze and any array as asc asymmetric authorization between bigint binary bit
    boolean both case cast char character check coalesce collate collation column concurrently
    constraint create cross current_catalog current_date current_role current_schema
    current_time current_timestamp current_user dec decimal default deferrable desc distinct do
    else end except exists extract false fetch float for foreign freeze from full grant greatest
    group grouping having ilike in initially inner inout int integer intersect interval into is
    isnull join json json_array json_arrayagg json_exists json_object json_objectagg json_query
    json_scalar json_serialize json_table json_value lateral leading least left like limit
    localtime localtimestamp merge_action national natural nchar none normalize not notnull null
    nullif numeric offset on only or order out outer overlaps overlay placing position precision
    primary real references returning right row select session_user setof similar smallint some
    substring symmetric system_user table tablesample then time timestamp to trailing treat trim
    true union unique user using values varchar variadic verbose when where window with
    xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot
    xmlserialize xmltable
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Grant:
    """A privilege that a role lacks.

    ``what`` precedes the object; ``why`` becomes a comment.

    >>> tables = [Grant("select on", "public.t"), Grant("select on", "public.u")]
    >>> statements("r", [*tables, Grant("create on database", "shop", "new")])
    ['grant select on public.t, public.u to r;', 'grant create on database shop to r;  -- new']
    """

    what: str
    name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class RoleAttribute:
    """An attribute that a role lacks.

    >>> statements("r", [RoleAttribute("replication")])
    ['alter role r replication;']
    """

    name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class DefaultGrant:
    """SELECT on tables that ``creator`` will create in a schema.

    A partition created later doesn't inherit the grants of existing ones.

    >>> statements("r", [DefaultGrant("app", "sales")])
    ['alter default privileges for role app in schema sales grant select on tables to r;  -- for\
 every table that app will create in sales, among them future partitions']
    """

    creator: str
    schema: str


Need = Grant | RoleAttribute | DefaultGrant


def statements(role: str, needs: Iterable[Need]) -> list[str]:
    """Returns the SQL that grants ``role`` (as SQL writes it) all of this, a statement per
    privilege.
    """
    names: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    attributes, defaults = [], []
    for need in dict.fromkeys(needs):
        if isinstance(need, RoleAttribute):
            attributes.append(f"alter role {role} {need.name};{_comment(need.why)}")
        elif isinstance(need, DefaultGrant):
            privilege = f"grant select on tables to {role};"
            covers = f"every table that {need.creator} will create in {need.schema}"
            why_given = f"for {covers}, among them future partitions"
            defaults.append(
                f"alter default privileges for role {need.creator} in schema {need.schema}"
                f" {privilege}{_comment(why_given)}"
            )
        else:
            listed = names.setdefault(need.what, [])
            listed += [need.name] if need.name not in listed else []
            why.setdefault(need.what, need.why)
    grants = [
        f"grant {what} {', '.join(of)} to {role};{_comment(why[what])}"
        for what, of in names.items()
    ]
    return [*attributes, *grants, *defaults]


def sql_name(*parts: str) -> str:
    """Returns a name as SQL writes it, quoted only where necessary.

    >>> sql_name("public", "order"), sql_name("Odd")
    ('public."order"', '"Odd"')
    """
    return ".".join(
        part
        if (PLAIN_NAME.match(part) is not None and part not in _RESERVED)
        else '"' + part.replace('"', '""') + '"'
        for part in parts
    )


def columns_of(names: Sequence[str]) -> str:
    """Returns columns as GRANT lists them after a privilege."""
    return f"({', '.join(map(sql_name, names))})"


def on_one_line(text: str) -> str:
    """Returns a text for a comment, which a line break would end; names may contain one."""
    return "".join(char if char.isprintable() else " " for char in text)


def _comment(why: str) -> str:
    return f"  -- {on_one_line(why)}" if why else ""

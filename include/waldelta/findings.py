"""Preflight's findings: problems refuse setup, warnings have figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from waldelta.grants import Need, statements

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


def problem_if(found: object, text: str) -> tuple[Finding, ...]:
    """Returns a problem if something was found, or a condition holds."""
    return (problem(text),) if found else ()


def warning_if(found: object, text: str) -> tuple[Finding, ...]:
    """Returns a warning if something was found, or a condition holds."""
    return (warning(text),) if found else ()


def lacking(text: str, *needs: Need) -> Finding:
    """Returns a finding that refuses setup: the role lacks privileges for the pipeline's own
    work.
    """
    return Finding("problem", text, "privilege", needs)


def owning(text: str, *needs: Need) -> Finding:
    """Returns a finding that refuses setup by this role: the change needs an owner, or a DBA."""
    return Finding("problem", text, "ownership", needs)


def warning(text: str) -> Finding:
    """Returns a finding that is a matter of policy."""
    return Finding("warning", text)


def merged(findings: Iterable[Finding], role: str, *, for_dba: bool = False) -> list[Finding]:
    """Returns the findings with one, with a single list of grants, for all missing privileges.

    ``for_dba``: without findings that the plan's SQL, run by a DBA, resolves.
    """
    rest: list[Finding] = []
    lacks: dict[Lack, list[Finding]] = {"privilege": [], "ownership": []}
    for found in findings:
        # A lake that can't be written is a missing permission too, but no SQL statement grants it.
        if found.lacks is None or (found.lacks == "privilege" and not found.needs):
            rest.append(found)
        else:
            lacks[found.lacks].append(found)
    own, owners = lacks["privilege"], [] if for_dba else lacks["ownership"]
    if not own and not owners:
        return rest
    parts = []
    if own:
        parts.append(
            f"role {role} lacks privileges; let the objects' owner, or a superuser,"
            f" run:\n{_listed(role, own)}"
        )
    if owners:
        what = "; ".join(dict.fromkeys(found.text for found in owners))
        # If one part can't be granted, granting the others doesn't let the role run setup.
        own_it = (
            f"\nor, to let this role run setup itself:\n{_listed(role, owners)}"
            if all(found.needs for found in owners)
            else ""
        )
        parts.append(
            f"role {role} may not make the planned changes ({what}): let the owner, or a DBA, run"
            f" the SQL that setup --sql prints, or run setup as a role that only sets up{own_it}"
        )
    return [*rest, Finding("problem", "\n".join(parts), "privilege" if own else "ownership")]


def _listed(role: str, findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"    {line}"
        for line in statements(role, (need for found in findings for need in found.needs))
    )

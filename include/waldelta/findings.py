"""What preflight finds: problems refuse set-up, warnings come with figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from waldelta.grants import Need, statements

Lack = Literal["privilege", "ownership"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing preflight found; a ``problem`` refuses set-up.

    ``lacks``: the role that asks lacks a privilege, for its own work, or what only the
    publications' change needs (``ownership``), which a DBA who runs the plan's SQL has. ``needs``
    are the statements that give it to the role; none where only a superuser has it.
    """

    severity: Literal["problem", "warning"]
    text: str
    lacks: Lack | None = None
    needs: tuple[Need, ...] = ()

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


def problem(text: str) -> Finding:
    """A finding that refuses set-up."""
    return Finding("problem", text)


def lacking(text: str, *needs: Need) -> Finding:
    """A finding that refuses set-up by this role: it lacks privileges for the pipeline's own
    work.
    """
    return Finding("problem", text, "privilege", needs)


def owning(text: str, *needs: Need) -> Finding:
    """A finding that refuses set-up by this role: what setup would do takes an owner, or a DBA."""
    return Finding("problem", text, "ownership", needs)


def warning(text: str) -> Finding:
    """A finding that is a matter of policy."""
    return Finding("warning", text)


def merged(findings: Iterable[Finding], role: str, *, for_dba: bool = False) -> list[Finding]:
    """The findings with one for all that the role lacks, which has one list of grants.

    ``for_dba``: without what the plan's SQL, run by a DBA, takes care of.
    """
    rest: list[Finding] = []
    lacks: dict[Lack, list[Finding]] = {"privilege": [], "ownership": []}
    for found in findings:
        # A lake that can't be written is a lacking right, too, but none that statements give.
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
        # Where a part can't be granted, the grants of the others don't let the role set up.
        own_it = (
            f"\nor, where this role is to set up by itself:\n{_listed(role, owners)}"
            if all(found.needs for found in owners)
            else ""
        )
        parts.append(
            f"role {role} can't set up what is to be changed ({what}): let the owner, or a DBA, run"
            f" the SQL that setup --sql prints{own_it}"
        )
    return [*rest, Finding("problem", "\n".join(parts), "privilege" if own else "ownership")]


def _listed(role: str, findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"    {line}"
        for line in statements(role, (need for found in findings for need in found.needs))
    )

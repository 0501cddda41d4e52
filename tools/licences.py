"""List the licences of what waldelta needs at run time; fails on one that isn't allowed.

    python tools/licences.py

A distribution's metadata names its licence as an SPDX expression, or else in its classifiers or as
a text. The packages are those that pyproject.toml names, with all extras, and what these need.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# What an Apache-2.0 program may need: permissive licences, and weaker forms of copyleft, whose
# conditions concern changes of the package itself.
ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Artistic-1.0-Perl",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0-1.0",
        "ISC",
        "LGPL-3.0-only",
        "LGPL-3.0-or-later",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
# Classifiers and texts that name one licence.
_NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
# What the licence file of a package says, where its metadata doesn't name one licence.
_STATED = {
    "psycopg2-binary": "LGPL-3.0-or-later",
    "text-unidecode": "Artistic-1.0-Perl OR GPL-2.0-or-later",
}
_TOKEN = re.compile(r"[()]|[^\s()]+(?: WITH [^\s()]+)?")


_Found = dict[tuple[str, str], Distribution]


def packages() -> dict[str, Distribution]:
    """Returns the distributions that waldelta needs with all extras, as they are installed here."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    named = [*project["dependencies"], *(one for listed in extras for one in listed)]
    wanted, found = [Requirement(text) for text in named], _Found()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in found:
                found[name, extra] = distribution(name)
                wanted += _needed(found[name, extra], extra)
    return {name: of for (name, extra), of in sorted(found.items()) if not extra}


def _needed(of: Distribution, extra: str) -> Iterator[Requirement]:
    """Yields what a distribution needs on this machine, or one extra of it does."""
    for text in of.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if (extra == "" and marker is None) or (
            marker is not None
            and marker.evaluate({"extra": extra})
            and (not extra or not marker.evaluate({"extra": ""}))
        ):
            yield requirement


def licence(name: str, of: Distribution) -> str:
    """Returns a distribution's licence as an SPDX expression, or as its metadata names it."""
    if expression := _STATED.get(name) or of.metadata.get("License-Expression"):
        return str(expression)
    classifiers = of.metadata.get_all("Classifier") or []
    named = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::")]
    text = str(of.metadata.get("License") or "").strip()
    named = [one for one in named if one != "OSI Approved"] or text.splitlines()[:1]
    return " AND ".join(_NAMES.get(one.lower(), one) for one in named) or "unknown"


def is_allowed(expression: str) -> bool:
    """Returns whether one choice that an SPDX expression leaves has only allowed licences.

    A text that is no such expression isn't allowed.
    """
    tokens = _TOKEN.findall(expression)
    try:
        return _any(tokens) and not tokens
    except IndexError:  # It ends too early.
        return False


def _any(tokens: list[str]) -> bool:
    found = _all(tokens)
    while tokens[:1] == ["OR"]:
        tokens.pop(0)
        found = _all(tokens) or found
    return found


def _all(tokens: list[str]) -> bool:
    found = _one(tokens)
    while tokens[:1] == ["AND"]:
        tokens.pop(0)
        found = _one(tokens) and found
    return found


def _one(tokens: list[str]) -> bool:
    if (token := tokens.pop(0)) != "(":
        return token in ALLOWED
    found = _any(tokens)
    return tokens.pop(0) == ")" and found


def main() -> int:
    """Print each package with its licence; returns 1 when one isn't allowed or isn't installed."""
    try:
        found = {name: licence(name, of) for name, of in packages().items()}
    except PackageNotFoundError as err:
        print(f"licences: {err.name} isn't installed here: run make setup", file=sys.stderr)
        return 1
    for name, named in found.items():
        print(f"{name:45} {named}")
    if refused := {name: named for name, named in found.items() if not is_allowed(named)}:
        for name, named in refused.items():
            print(f"licences: {name} has {named}, which isn't allowed", file=sys.stderr)
        print(
            "licences: choose another package; or add the licence to ALLOWED in tools/licences.py,"
            " or what the package's licence file says to _STATED",
            file=sys.stderr,
        )
        return 1
    print(f"{len(found)} packages, each with an allowed licence")
    return 0


if __name__ == "__main__":
    sys.exit(main())

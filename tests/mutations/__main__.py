"""Whether tests catch the mutations of the table: ``make mutations``, or ``python -m
tests.mutations --only 3,7``.

A temporary git worktree of HEAD gets one mutation at a time and runs the tests that the table names
for it, as far as they belong to ``make test``. The exit status isn't 0 when a mutation survives.
caught.json records the code of each module whose mutations were all caught; ``--changed`` runs
those of the modules of the core that have other code by now.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.mutation import LIBRARY, Mutation
from tests.tiers import ORDINARY

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
# By module, a digest of the code and the mutations that were caught last.
CAUGHT = Path(__file__).with_name("caught.json")
# What --changed looks at: the way of a message into a target.
_CORE = ("changes/", "slot/", "lake/", "pgoutput/")
# What ``make setup`` made; a worktree shares it.
_SHARED = (".venv", ".cache")
_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


@contextmanager
def _worktree() -> Iterator[Path]:
    """Yield a temporary worktree of HEAD."""
    with tempfile.TemporaryDirectory(prefix="waldelta-mutations-") as folder:
        root = Path(folder) / "waldelta"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), "HEAD"], check=True)
        try:
            for name in _SHARED:
                if (ROOT / name).exists():
                    (root / name).symlink_to((ROOT / name).resolve())
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def _run(root: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests in the worktree up to the first failure; returns pytest's status and output."""
    folders = (root / "include", root / "plugins", root)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    # Where it is set, each run would compile all modules again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-m", ORDINARY]
    command += ["-x", "-q", "-rfE", "--tb=line", "--color=no"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=root, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _write(path: Path, source: str) -> None:
    """Write a module and remove its bytecode, which has the same second and size at times."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _verdict(root: Path, mutation: Mutation) -> tuple[bool, str]:
    """Return whether a test failed by the mutation, and which, or what happened instead."""
    path = mutation.path(root)
    source = path.read_text()
    try:
        _write(path, mutation.mutated(source))
        status, output = _run(root, mutation.tests)
    except (ValueError, subprocess.TimeoutExpired) as err:
        return False, str(err)
    finally:
        _write(path, source)
    if status == 0:
        return False, "SURVIVED"
    # An error before or outside a test, such as a server that doesn't start, catches nothing.
    failed = _FAILED.search(output)
    return failed is not None, failed[1] if failed else f"NO RESULT\n{output[-2000:]}"


@cache
def _recorded() -> dict[str, str]:
    """Return the digests of the modules whose mutations were caught last."""
    return json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}


@cache
def _digest(file: str) -> str:
    """Return a digest of a module's code in HEAD, without its prose, and of its mutations."""
    text = subprocess.check_output(["git", "-C", str(ROOT), "show", f"HEAD:{LIBRARY / file}"])
    code = ast.parse(text)
    for node in ast.walk(code):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    own = [mutation for mutation in MUTATIONS if mutation.file == file]
    return hashlib.sha256((ast.unparse(code) + repr(own)).encode()).hexdigest()


def _record(chosen: dict[int, Mutation], missed: list[int]) -> None:
    """Record the modules whose mutations were all caught, and no longer those of a missed one."""
    survived = {MUTATIONS[number - 1].file for number in missed}
    untried = {m.file for number, m in enumerate(MUTATIONS, 1) if number not in chosen}
    caught = {mutation.file for mutation in MUTATIONS} - survived - untried
    recorded = {file: digest for file, digest in _recorded().items() if file not in survived}
    recorded |= {file: _digest(file) for file in caught}
    CAUGHT.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


def _is_changed(mutation: Mutation) -> bool:
    """Return whether a module of the core has other code than when its mutations were caught."""
    file = mutation.file
    return file.startswith(_CORE) and _recorded().get(file) != _digest(file)


def _check(root: Path, chosen: dict[int, Mutation]) -> list[int]:
    """Try the mutations and print a line for each; returns those that weren't caught."""
    tests = sorted({test for mutation in chosen.values() for test in mutation.tests})
    print(f"without a mutation: {len(tests)} test files", flush=True)
    status, output = _run(root, tests)
    if status:
        sys.exit(f"the tests fail without any mutation:\n{output[-2000:]}")
    missed = []
    for number, mutation in chosen.items():
        print(f"{number:3} {mutation.file}: {mutation.breaks}", flush=True)
        began = time.monotonic()
        is_caught, what = _verdict(root, mutation)
        seconds = time.monotonic() - began
        print(f"    {'caught by ' if is_caught else ''}{what} ({seconds:.0f} s)", flush=True)
        if not is_caught:
            missed.append(number)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations caught", end="")
    print(f"; not caught: {', '.join(map(str, missed))}" if missed else "")
    return missed


def main() -> None:
    """Try all mutations, or the chosen ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="N,M", help="the numbers of the mutations to try")
    parser.add_argument("--unit", action="store_true", help="those that unit tests catch")
    parser.add_argument("--changed", action="store_true", help="those of changed core modules")
    options = parser.parse_args()
    only = {int(number) for number in options.only.split(",")} if options.only else None
    chosen = {
        number: mutation
        for number, mutation in enumerate(MUTATIONS, 1)
        if (only is None or number in only)
        and (mutation.is_unit or not options.unit)
        and (not options.changed or _is_changed(mutation))
    }
    if not chosen and options.changed:
        print("no module of the core has changed since its mutations were caught")
        return
    if not chosen:
        parser.error("no mutation is chosen")
    with _worktree() as root:
        missed = _check(root, chosen)
    _record(chosen, missed)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()

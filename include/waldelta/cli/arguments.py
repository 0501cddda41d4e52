"""The command line's grammar: each verb with the options that it knows, so that one meant for another is refused, not ignored."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from waldelta.decisions import DECISIONS
from waldelta.errors import ConfigError
from waldelta.stages.repair.replay.interval import REPLAY

# A quoted name may have commas of its own.
_LISTED = re.compile(r'(?:"[^"]*(?:"|$)|[^",])+')


def _listed(text: str) -> list[str]:
    return [part for part in (item.strip() for item in _LISTED.findall(text)) if part]


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_Options = dict[str, dict[str, Any]]

# Airflow's tasks give these to every verb.
_RUN: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "--run-id": {"help": "name of the run; Airflow's dag run id"},
        "--run-type": {"choices": ("scheduled", "manual", "backfill"), "default": "manual", "help": "who asked for it"},
        "--interval-start": {"type": _moment, "help": "the run's data interval (UTC unless it says); replay: of the runs from here on"},
        "--interval-end": {"type": _moment, "help": "its end; replay: and before this"},
        "--result": {"type": Path, "help": "write the result as JSON to this file"},
    }
)  # fmt: skip
_STAGE: _Options = {"--stage": {"type": _listed, "help": "run these stages of the verb only, comma-separated"}}
_TABLES: _Options = {"--tables": {"type": _listed, "help": "these tables only, comma-separated"}}
_COPY: _Options = {**_STAGE, **_TABLES, "--reason": {"help": "why, for the ledger"}}
_FLAG: dict[str, Any] = {"action": "store_true"}
_OWN: Mapping[str, tuple[str, _Options]] = MappingProxyType(
    {
        "check": ("whether setup would work, and its plan; changes nothing", {
            "--sql": _FLAG | {"help": "print the SQL for a DBA"},
        }),
        "setup": ("publications and slot as the file wants them", {
            "--dry-run": _FLAG | {"help": "show the plan and change nothing"},
            "--sql": _FLAG | {"help": "print the SQL for a DBA and change nothing"},
        }),
        "sync": ("copy tables as a whole", _COPY | {
            "--due": _FLAG | {"help": "of --tables only those that get no changes until they are copied"},
        }),
        "resync": ("make a lost slot anew and mend the targets", _COPY | {
            "--accept-server": {"metavar": "SYSTEM/TIMELINE", "help": "from a server that isn't the one of before"},
        }),
        "consume": ("land, apply and check what the slot holds", _STAGE | {
            "--hand-over": _FLAG | {"help": "a sync follows, leave large tables to be copied again to it"},
            "--again": _FLAG | {"help": "these stages ran before; of a run that ended well they replay"},
        }),
        REPLAY: ("derive anew, from the change log, what the runs of an interval changed", _STAGE | _TABLES),
        "reconcile": ("whether targets hold what the source does", _COPY | {
            "--repair": _FLAG | {"help": "read the rows that differ again and put them right"},
            "--by": {"help": "who asks for it; by default the user of this process"},
        }),
        "validate": ("check every target's expectations", {}),
        "maintain": ("compact, clean up, prune", {}),
        "status": ("slot, lag, gaps and targets as JSON", {}),
        "quarantine": ("the rows that targets lack", _TABLES | {
            "--retry": _FLAG | {"help": "read these rows from the source again and judge them again"},
            "--accept": _FLAG | {"help": "read these rows (--row, or all of --tables) again and write them whatever their gates say"},
            "--discard": _FLAG | {"help": "the target is to lack these rows (--row, or all of --tables)"},
            "--release": _FLAG | {"help": "what has landed for --tables passes their stop gates"},
            "--skip": _FLAG | {"help": "runs go on without these messages that can't be read (--row)"},
            "--row": {"action": "extend", "type": _listed, "metavar": "ID", "help": "of the list, to be accepted, discarded or skipped; repeat it, or write commas, for several"},
            "--by": {"help": "who asks for it; by default the user of this process"},
            "--reason": {"help": "why, for the ledger; every decision but --retry needs it"},
        }),
        "teardown": ("drop the slot and the publications that this pipeline made", {
            "--orphans": _FLAG | {"help": "list the source's slots that no pipeline file in FILE's folder names"},
            "--drop": {"type": _listed, "help": "drop these orphans, comma-separated"},
        }),
    }
)  # fmt: skip

# For the tests that hold each verb against Airflow's options and against the documentation.
VERBS: Final = tuple(_OWN)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The verb, the file and the verb's options by name; leaves the process with a usage message for anything else."""
    parser = argparse.ArgumentParser(prog="python -m spark_jobs", description="One verb on one pipeline file.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (does, own) in _OWN.items():
        # An abbreviation that is unique today is another option's tomorrow.
        known = verbs.add_parser(verb, help=does, description=does, allow_abbrev=False)
        known.add_argument("file", metavar="FILE", type=Path, help="the pipeline file")
        for name, details in {**own, **_RUN}.items():
            known.add_argument(name, **details)
        known.set_defaults(**{option: None for option in ("stage", "tables") if f"--{option}" not in own})
    options = parser.parse_args(arguments)
    if options.verb == "quarantine":
        _check_quarantine(parser, options)
    return options


def _check_quarantine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option that means nothing beside the others is refused here too."""
    asked = [name for name in DECISIONS if getattr(options, name)]
    if len(asked) > 1:
        parser.error(f"--{asked[0]} and --{asked[1]} exclude each other")
    for name in ("row", "reason", "by"):
        if getattr(options, name) and not asked:
            *most, last = (f"--{decision}" for decision in DECISIONS)
            parser.error(f"--{name} needs {', '.join(most)} or {last}")


def check_decision(options: argparse.Namespace) -> None:
    """Raise ConfigError for a decision that can't be: Airflow's form lets people ask for it, and what it meets has to be told there."""
    if options.verb != "quarantine":
        return
    if options.row and options.retry:
        raise ConfigError(
            "single rows can't be judged again, only all that a table lacks: name the table (--tables); --accept takes single rows"
        )
    if options.accept and not (options.row or options.tables):
        raise ConfigError("name the rows that are to be accepted (--row), or tables whose rows all are (--tables)")
    if options.row and options.release:
        raise ConfigError(
            "rows aren't released but tables are, with all that has landed for them: name these (--tables)"
        )
    if options.skip and options.tables:
        raise ConfigError("messages are skipped one by one: name these (--row), not tables")
    if options.release and not options.tables:
        raise ConfigError("name the tables whose changes are to pass (--tables)")
    if any(getattr(options, name) for name in DECISIONS if name != "retry") and not (options.reason or "").strip():
        raise ConfigError("a decision needs a reason, which the ledger keeps: say why (--reason)")

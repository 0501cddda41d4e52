"""The command line's grammar: each verb with its options, so that an option of another verb is
refused instead of ignored; and the script by which a shell completes them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from waldelta.cli._output import COMMAND
from waldelta.config import split_table_name
from waldelta.config.stores import STORES
from waldelta.decision_kinds import ACTIONS, DecisionRequest
from waldelta.errors import ConfigError
from waldelta.rehearsal.report import FAILING, KINDS
from waldelta.stages.repair.replay.interval import REPLAY

_MODULES: Final = ("waldelta", "spark_jobs")
# A quoted name may contain commas.
_LISTED = re.compile(r'(?:"[^"]*(?:"|$)|[^",])+')
_FILES, _FOLDERS = frozenset({"file", "pipeline", "result", "place"}), frozenset({"folder"})


def split_names(text: str) -> list[str]:
    """Returns the names of a list.

    >>> split_names('public.a, "odd,name".b')
    ['public.a', '"odd,name".b']
    """
    return [part for part in (item.strip() for item in _LISTED.findall(text)) if part]


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write it as 2026-01-31T08:00, in UTC unless it has an offset"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_Options = dict[str, dict[str, Any]]

# Airflow's tasks pass these to every verb.
RUN_OPTIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "--run-id": {
            "metavar": "ID",
            "help": "name of the run in the ledger; Airflow passes the id of its DAG run",
        },
        "--run-type": {
            "choices": ("scheduled", "manual", "backfill"),
            "default": "manual",
            "help": "how the run was started",
        },
        "--again": {
            "action": "store_true",
            "help": (
                "run what another process left of the run --run-id, or replay a consume that"
                " succeeded"
            ),
        },
        "--interval-start": {
            "type": _moment,
            "metavar": "TIME",
            "help": ("begin of the run's data interval; UTC unless it has an offset"),
        },
        "--interval-end": {
            "type": _moment,
            "metavar": "TIME",
            "help": "end of the run's data interval",
        },
        "--lock-wait": {
            "type": float,
            "metavar": "SECONDS",
            "default": 0.0,
            "help": "how long to wait for another run that works on the same slot or target",
        },
        "--result": {
            "type": Path,
            "metavar": "PATH",
            "help": "write the run's result to this file, as JSON",
        },
    }
)
_INTERVAL = ("--interval-start", "--interval-end")
# Every verb that has a result takes these.
OUTPUT_OPTIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "--json": {
            "action": "store_true",
            "help": "print the result, or the error, as one JSON document",
        }
    }
)
_NAMES = {"type": split_names, "metavar": "NAME,NAME"}


def _some_of(noun: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """Returns what splits a list of these names; it raises argparse's error for another one."""

    def split(text: str) -> list[str]:
        parts = split_names(text)
        if unknown := sorted(set(parts) - set(names)):
            raise argparse.ArgumentTypeError(
                f"there is no {noun} {unknown[0]!r}: the {noun}s are {', '.join(names)}"
            )
        return parts

    return split


def _at_least(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = kind(text)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return read


def _stages(*names: str) -> _Options:
    stages = {"type": _some_of("stage", names), "help": f"run only some of {', '.join(names)}"}
    return {"--stage": _NAMES | stages}


_STORES_WITH_JARS = ", ".join(name for name, store in STORES.items() if store.has_jars)
_TABLES: _Options = {"--tables": (_NAMES | {"help": "work on these tables only, as schema.table"})}
_REASON: _Options = {
    "--reason": {"metavar": "TEXT", "help": "why you run it; the ledger keeps the text"}
}
_CDC_STAGES = _stages("land", "apply", "check", "report")
_BY: _Options = {
    "--by": {"metavar": "NAME", "help": "who decides; the default is the user of this process"}
}
_FLAG: dict[str, Any] = {"action": "store_true"}
# What ``decide`` shows instead of deciding.
LISTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "list": "print what waits, since when and why",
        "show": "print the same with received values, messages and failing rows",
    }
)
_ACTIONS = {**LISTS, **{name: action.does for name, action in ACTIONS.items()}}
_DECIDE: _Options = {
    "action": {
        "choices": tuple(_ACTIONS),
        "metavar": "ACTION",
        "help": "; ".join(f"{name}: {does}" for name, does in _ACTIONS.items()),
    },
    "--ids": {
        "action": "extend",
        "type": split_names,
        "metavar": "ID,ID",
        "default": [],
        "help": "ids of rows and messages, as the list shows them",
    },
    "--reason": {
        "metavar": "TEXT",
        "help": "why you decide so, for the ledger; only retry needs none",
    },
}
# ``--tables`` is the same for all verbs.
INIT_OPTIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "conn": {"metavar": "CONN", "help": "id of the source's Airflow connection"},
        "--output": {
            "type": Path,
            "metavar": "FILE",
            "help": (
                "pipeline file to write, <pipeline>.yml by default; init writes the SQL for the"
                " tables' owner to the same path with the suffix .sql"
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
            "help": "URI of the lake's folder; by default ./lake",
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
VERBS: Mapping[str, tuple[str, _Options]] = MappingProxyType(
    {
        "check": (
            "test whether setup would work and print its plan; changes nothing",
            {
                "--sql": _FLAG | {"help": "print the SQL that a DBA can run in place of setup"},
            },
        ),
        "setup": (
            "create the publications and the slot that the pipeline file describes",
            {
                "--expect": {
                    "metavar": "DIGEST",
                    "help": "change nothing unless the plan is the one that rehearse printed",
                },
                "--dry-run": _FLAG | {"help": "print the plan and change nothing"},
                "--sql": (
                    _FLAG
                    | {
                        "help": (
                            "print the SQL that a DBA can run in place of setup, and change nothing"
                        )
                    }
                ),
            },
        ),
        "sync": (
            "copy tables without a complete copy, or those of --tables (initial snapshot)",
            _stages("sync", "check", "report")
            | _TABLES
            | _REASON
            | {
                "--due": (
                    _FLAG
                    | {
                        "help": (
                            "copy only those of --tables that get no changes until they are copied"
                        )
                    }
                ),
            },
        ),
        "resync": (
            "recreate a lost slot and repair the tables",
            _stages("resync", "check", "report")
            | _TABLES
            | _REASON
            | {
                "--accept-server": {
                    "metavar": "SYSTEM/TIMELINE",
                    "help": (
                        "accept this server, although it isn't the one that the pipeline read"
                        " before"
                    ),
                },
            },
        ),
        "consume": (
            "land the changes that the slot holds, apply them and check the targets",
            _CDC_STAGES
            | {
                "--hand-over": (
                    _FLAG | {"help": "leave large tables that need a new copy to a later sync"}
                ),
            },
        ),
        REPLAY: (
            "recompute, from the change log, the rows that the runs of an interval changed",
            _CDC_STAGES | _TABLES,
        ),
        "reconcile": (
            "compare targets with the source",
            _stages("reconcile", "report")
            | _TABLES
            | _REASON
            | _BY
            | {
                "--repair": (
                    _FLAG
                    | {
                        "help": (
                            "read rows that differ from the source again and correct the targets"
                        )
                    }
                ),
            },
        ),
        "repair": (
            "compare targets with the source and correct rows that differ",
            _TABLES | _REASON | _BY,
        ),
        "validate": ("check the expectations of every target", {}),
        "maintain": ("compact files, delete old ones, prune the change log and the ledger", {}),
        "status": (
            "print slot, replication lag, data gaps and targets; fails for a missing or lost slot",
            {},
        ),
        "decide": (
            "list what waits for a decision, and decide",
            _DECIDE | _TABLES | _BY,
        ),
        "dbt-sources": ("print dbt's sources.yml of the targets, with comments and tests", {}),
        "teardown": (
            "drop the slot and the publications that this pipeline created",
            {
                "--orphans": (
                    _FLAG
                    | {
                        "help": (
                            "list slots on the source that no pipeline file in FILE's folder names"
                        )
                    }
                ),
                "--drop": {
                    "type": split_names,
                    "metavar": "SLOT,SLOT",
                    "help": "drop these slots without a pipeline",
                },
            },
        ),
    }
)

SHELLS: Final = ("bash", "zsh", "fish")
_PLACE: dict[str, Any] = {
    "nargs": "?",
    "type": Path,
    "help": "the pipeline files; WALDELTA_PIPELINES by default",
}
# The verbs that need no pipeline file: what each does, its arguments.
VERBS_WITHOUT_FILE: Mapping[str, tuple[str, _Options]] = MappingProxyType(
    {
        "rehearse": (
            "run a migration on a throw-away server, with the pipeline behind it, and report",
            {
                "file": {"metavar": "FILE", "type": Path, "help": "the pipeline file"},
                "--migration": {
                    "action": "extend",
                    "nargs": "+",
                    "type": Path,
                    "metavar": "FILE",
                    "default": [],
                    "help": "files of SQL, in the order in which they run",
                },
                "--pipeline-change": {
                    "type": Path,
                    "metavar": "FILE",
                    "help": "a changed pipeline file, which setup follows after the migration",
                },
                "--schema": {
                    "type": Path,
                    "metavar": "FILE",
                    "help": (
                        "the database's schema, as pg_dump --schema-only writes it; without it,"
                        " pg_dump reads it from the source"
                    ),
                },
                "--from": {
                    "dest": "source",
                    "metavar": "CONN",
                    "help": (
                        "id of the connection that schema and sizes are read from, source.conn_id"
                        " by default; nothing is written there"
                    ),
                },
                "--sample": {
                    "type": _at_least(0, int),
                    "default": 0,
                    "metavar": "N",
                    "help": "copy this many rows of each published table, instead of making some",
                },
                "--scratch": {
                    "metavar": "CONN",
                    "help": (
                        "id of a connection whose server gets a database for the rehearsal; a"
                        " server is started here by default"
                    ),
                },
                "--role": {
                    "metavar": "NAME",
                    "help": "who runs the migration; the owner of the published tables by default",
                },
                "--statement-timeout": {
                    "type": _at_least(0.001, float),
                    "default": 60.0,
                    "metavar": "SECONDS",
                    "help": "how long a statement of the migration may take, 60 by default",
                },
                "--fail-on": _NAMES
                | {
                    "type": _some_of("kind", KINDS),
                    "metavar": "KIND,KIND",
                    "default": list(FAILING),
                    "help": (
                        "what ends the command with code 3, besides error: some of"
                        f" {', '.join(KINDS)}; {','.join(FAILING)} by default"
                    ),
                },
                "--markdown": {
                    "type": Path,
                    "metavar": "FILE",
                    "help": "also write the report as Markdown, for a pull request",
                },
                "--junit": {
                    "type": Path,
                    "metavar": "FILE",
                    "help": "also write the report as JUnit's XML",
                },
                **OUTPUT_OPTIONS,
            },
        ),
        "init": (
            "write a pipeline file for tables of a database, and the SQL for its role",
            {**INIT_OPTIONS, **_TABLES, **OUTPUT_OPTIONS},
        ),
        "jars": (
            (
                "download the jars of Delta, and those of object stores, for local sessions and"
                " spark-submit"
            ),
            {
                "folder": {
                    "metavar": "FOLDER",
                    "nargs": "?",
                    "type": Path,
                    "help": "where to; set WALDELTA_JARS to it, so that jobs find them",
                },
                "--stores": _NAMES
                | {"default": [], "help": f"also fetch the jars of these: {_STORES_WITH_JARS}"},
                **OUTPUT_OPTIONS,
            },
        ),
        "connect-server": (
            "run a Spark Connect server with Delta on this machine, for Airflow and the verbs",
            {
                "--port": {
                    "type": int,
                    "default": 15002,
                    "metavar": "PORT",
                    "help": "port on this machine alone, 15002 by default",
                }
            },
        ),
        "list": (
            "list a folder's pipelines with their last runs; fails for an invalid pipeline file",
            {"folder": _PLACE | {"metavar": "FOLDER"}, **OUTPUT_OPTIONS},
        ),
        "doctor": (
            "check this installation, and a pipeline, and say what to do",
            {
                "pipeline": _PLACE | {"metavar": "FILE", "help": "the pipeline file"},
                "--workers": _FLAG | {"help": "ask Spark's workers what they lack"},
                **OUTPUT_OPTIONS,
            },
        ),
        "airflow setup": (
            "create the pools that pipelines need in Airflow; list missing connections",
            {
                "place": _PLACE | {"metavar": "FOLDER|FILE"},
                "--dry-run": _FLAG | {"help": "say what is missing and change nothing"},
                "--add-connections": (
                    _FLAG | {"help": "also store connections that AIRFLOW_CONN_<CONN_ID> has here"}
                ),
                **OUTPUT_OPTIONS,
            },
        ),
        "completion": (
            "print a script that lets a shell complete verbs, options and files",
            {"shell": {"choices": SHELLS, "metavar": "|".join(SHELLS), "help": "the shell"}},
        ),
    }
)

# A verb that stands for another one with an option.
ALIASES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "repair": ("reconcile", {"repair": True}),
    }
)


def _program() -> str:
    """Returns how the process was started, for the usage: the command, or ``python -m MODULE``."""
    started = Path(sys.argv[0])
    is_module = started.name == "__main__.py" and started.parent.name in _MODULES
    return f"python -m {started.parent.name}" if is_module else COMMAND


def _version() -> str:
    """Returns the version of the installed wheel, or of a checkout when it was set up."""
    try:
        return version("waldelta")
    except PackageNotFoundError:  # The package is only on the path, as spark-submit ships it.
        return "unknown"


def build_parser(program: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line, with a parser of its own for each verb."""
    parser = argparse.ArgumentParser(
        prog=program or _program(),
        description="Run one verb on one pipeline file. VERB --help shows the options of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (does, own_options) in VERBS.items():
        # An abbreviation that is unique today may match another option later.
        verb_parser = verbs.add_parser(verb, help=does, description=does, allow_abbrev=False)
        verb_parser.add_argument("file", metavar="FILE", type=Path, help="the pipeline file")
        # An operator who replays by hand must choose the interval.
        for name, details in (*own_options.items(), *OUTPUT_OPTIONS.items()):
            verb_parser.add_argument(name, **details)
        interval = verb_parser.add_argument_group("interval to replay") if verb == REPLAY else None
        for name, details in RUN_OPTIONS.items():
            if interval is not None and name in _INTERVAL:
                interval.add_argument(name, **details)
            else:  # Airflow's tasks pass these; who types a verb needs none of them.
                verb_parser.add_argument(name, **details | {"help": argparse.SUPPRESS})
        verb_parser.set_defaults(
            **{option: None for option in ("stage", "tables") if f"--{option}" not in own_options}
        )
    for verb, (does, own_options) in VERBS_WITHOUT_FILE.items():
        program, _, last = verb.rpartition(" ")
        parsers = verbs
        if program:  # It has verbs of its own, by which waldelta sets it up.
            group = verbs.add_parser(program, help=f"what waldelta needs in {program}")
            group.set_defaults(verb_group=True)
            parsers = group.add_subparsers(dest="action", metavar="VERB", required=True)
        verb_parser = parsers.add_parser(last, help=does, description=does, allow_abbrev=False)
        for name, details in own_options.items():
            verb_parser.add_argument(name, **details)
        verb_parser.set_defaults(file=None, result=None)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The verb, the file and the verb's options by name; leaves the process with a usage message
    for anything else.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.verb, implied = ALIASES.get(options.verb, (options.verb, {}))
    vars(options).update(implied)
    if getattr(options, "result", None) is None:
        try:
            check_values(options)
        except ConfigError as err:
            parser.error(str(err))
    return options


def check_values(options: argparse.Namespace) -> None:
    """Raise ConfigError for values that no run can use.

    Airflow's forms allow such values, so the run that they start must report the error. For anyone
    else they are a wrong use of the command.
    """
    for name in getattr(options, "tables", None) or ():
        try:
            split_table_name(name)
        except ValueError as err:
            raise ConfigError(str(err)) from None
    if options.verb != "decide":
        return
    if options.action not in LISTS:
        request_of(options).check()
    elif options.reason or options.by:
        raise ConfigError(f"{options.action} decides nothing: leave out --reason and --by")


def request_of(options: argparse.Namespace) -> DecisionRequest:
    """Returns the decision that the options of ``decide`` name."""
    return DecisionRequest(
        options.action, options.ids, options.tables, options.reason, options.by or None
    )


def completion_script(shell: str) -> str:
    """Returns the script for a shell; raises ConfigError where package shtab isn't installed."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "shell completion needs package shtab: run `pip install 'waldelta[cli]'`"
        ) from None
    # The script is for the command, however this process was started.
    parser = build_parser(COMMAND)
    for verb in (parser, *_verbs(parser)):
        for action in verb._actions:  # noqa: SLF001 - argparse lists them nowhere else
            if action.dest in _FILES | _FOLDERS:
                action.complete = shtab.FILE if action.dest in _FILES else shtab.DIRECTORY
    return str(shtab.complete(parser, shell=shell))


def _verbs(parser: argparse.ArgumentParser) -> list[Any]:
    return [
        inner
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        for verb in action.choices.values()
        for inner in (verb, *_verbs(verb))
    ]

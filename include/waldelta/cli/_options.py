"""The command line's grammar: each verb with its options, so that an option of another verb is
refused instead of ignored; and the script by which a shell completes them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
from waldelta.pipeline import Job
from waldelta.rehearsal.impact_kinds import FAILING, KINDS
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


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: what it does, for helps; its own options; and the job that it runs on a runner, as
    ``module:function`` of ``waldelta.jobs``.

    The function gets each of the verb's own options by its name.
    """

    does: str
    options: _Options = field(default_factory=dict)
    job: str = ""

    @property
    def option_names(self) -> list[str]:
        """Returns the options' names in Python."""
        return [
            str(details.get("dest", name.lstrip("-").replace("-", "_")))
            for name, details in self.options.items()
        ]


def _flag(text: str, **details: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text, **details}


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
        "--again": _flag(
            "run what another process left of the run --run-id, or replay a consume that succeeded"
        ),
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
            "dest": "lock_wait_s",
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
    {"--json": _flag("print the result, or the error, as one JSON document")}
)
_FILE: _Options = {"file": {"metavar": "FILE", "type": Path, "help": "the pipeline file"}}
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
    return {
        "--stage": _NAMES
        | {
            "dest": "stages",
            "type": _some_of("stage", names),
            "help": f"run only some of {', '.join(names)}",
        }
    }


_STORES_WITH_JARS = ", ".join(name for name, store in STORES.items() if store.has_jars)
_TABLES: _Options = {"--tables": (_NAMES | {"help": "work on these tables only, as schema.table"})}
_REASON: _Options = {
    "--reason": {"metavar": "TEXT", "help": "why you run it; the ledger keeps the text"}
}
_CDC_STAGES = _stages("land", "apply", "check", "report")
_BY: _Options = {
    "--by": {"metavar": "NAME", "help": "who decides; the default is the user of this process"}
}
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
        "--yes": _flag("take all tables and ask nothing"),
    }
)
VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "check": Verb(
            "test whether setup would work and print its plan; changes nothing",
            {
                "--sql": _flag("print the SQL that a DBA can run in place of setup"),
            },
        ),
        "setup": Verb(
            "create the publications and the slot that the pipeline file describes",
            {
                "--expect": {
                    "metavar": "DIGEST",
                    "help": "change nothing unless the plan is the one that rehearse printed",
                },
                "--dry-run": _flag("print the plan and change nothing"),
                "--sql": _flag(
                    "print the SQL that a DBA can run in place of setup, and change nothing"
                ),
            },
        ),
        "sync": Verb(
            "copy tables without a complete copy, or those of --tables (initial snapshot)",
            _stages("sync", "check", "report")
            | _TABLES
            | _REASON
            | {
                "--due": _flag(
                    "copy only those of --tables that get no changes until they are copied",
                    dest="only_waiting",
                ),
            },
            "sync:run_sync",
        ),
        "resync": Verb(
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
            "sync:run_resync",
        ),
        "consume": Verb(
            "land the changes that the slot holds, apply them and check the targets",
            _CDC_STAGES
            | {
                "--hand-over": _flag("leave large tables that need a new copy to a later sync"),
            },
            "consume:consume",
        ),
        REPLAY: Verb(
            "recompute, from the change log, the rows that the runs of an interval changed",
            _CDC_STAGES | _TABLES,
            "replay:replay",
        ),
        "reconcile": Verb(
            "compare targets with the source",
            _stages("reconcile", "report")
            | _TABLES
            | _REASON
            | _BY
            | {
                "--repair": _flag(
                    "read rows that differ from the source again and correct the targets"
                ),
            },
            "reconcile:run_reconcile",
        ),
        "repair": Verb(
            "compare targets with the source and correct rows that differ",
            _TABLES | _REASON | _BY,
        ),
        "validate": Verb("check the expectations of every target", job="validate:run_validate"),
        "maintain": Verb(
            "compact files, delete old ones, prune the change log and the ledger",
            job="maintain:run_maintain",
        ),
        "status": Verb(
            "print slot, replication lag, data gaps and targets; fails for a missing or lost slot"
        ),
        "decide": Verb(
            "list what waits for a decision, and decide",
            _DECIDE | _TABLES | _BY,
            "decide:run_decide",
        ),
        "dbt-sources": Verb("print dbt's sources.yml of the targets, with comments and tests"),
        "teardown": Verb(
            "drop the slot and the publications that this pipeline created",
            {
                "--orphans": _flag(
                    "list slots on the source that no pipeline file in FILE's folder names"
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
VERBS_WITHOUT_FILE: Mapping[str, Verb] = MappingProxyType(
    {
        "rehearse": Verb(
            "run a migration on a throw-away server, with the pipeline behind it, and report",
            {
                **_FILE,
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
        "init": Verb(
            "write a pipeline file for tables of a database, and the SQL for its role",
            {**INIT_OPTIONS, **_TABLES, **OUTPUT_OPTIONS},
        ),
        "jars": Verb(
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
        "connect-server": Verb(
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
        "list": Verb(
            "list a folder's pipelines with their last runs; fails for an invalid pipeline file",
            {"folder": _PLACE | {"metavar": "FOLDER"}, **OUTPUT_OPTIONS},
        ),
        "doctor": Verb(
            "check this installation, and a pipeline, and say what to do",
            {
                "pipeline": _PLACE | {"metavar": "FILE", "help": "the pipeline file"},
                "--workers": _flag("ask Spark's workers what they lack"),
                **OUTPUT_OPTIONS,
            },
        ),
        "airflow setup": Verb(
            "create the pools that pipelines need in Airflow; list missing connections",
            {
                "place": _PLACE | {"metavar": "FOLDER|FILE"},
                "--dry-run": _flag("say what is missing and change nothing"),
                "--add-connections": _flag(
                    "also store connections that AIRFLOW_CONN_<CONN_ID> has here"
                ),
                **OUTPUT_OPTIONS,
            },
        ),
        "completion": Verb(
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
    for name, verb in VERBS.items():
        verb_parser = _verb_parser(
            verbs, name, replace(verb, options={**_FILE, **verb.options, **OUTPUT_OPTIONS})
        )
        # An operator who replays by hand must choose the interval.
        interval = verb_parser.add_argument_group("interval to replay") if name == REPLAY else None
        for option, details in RUN_OPTIONS.items():
            if interval is not None and option in _INTERVAL:
                interval.add_argument(option, **details)
            else:  # Airflow's tasks pass these; who types a verb needs none of them.
                verb_parser.add_argument(option, **details | {"help": argparse.SUPPRESS})
        absent = {"stages", "tables"}.difference(verb.option_names)
        verb_parser.set_defaults(**dict.fromkeys(absent))
    for name, verb in VERBS_WITHOUT_FILE.items():
        program, _, last = name.rpartition(" ")
        parsers = verbs
        if program:  # It has verbs of its own, by which waldelta sets it up.
            group = verbs.add_parser(program, help=f"what waldelta needs in {program}")
            group.set_defaults(verb_group=True)
            parsers = group.add_subparsers(dest="action", metavar="VERB", required=True)
        verb_parser = _verb_parser(parsers, last, verb)
        verb_parser.set_defaults(file=None, result=None)
    return parser


def _verb_parser(parsers: Any, name: str, verb: Verb) -> argparse.ArgumentParser:
    # An abbreviation that is unique today may match another option later.
    parser: argparse.ArgumentParser = parsers.add_parser(
        name, help=verb.does, description=verb.does, allow_abbrev=False
    )
    for option, details in verb.options.items():
        parser.add_argument(option, **details)
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
        DecisionRequest(**job_options(options)).check()
    elif options.reason or options.by:
        raise ConfigError(f"{options.action} decides nothing: leave out --reason and --by")


def run_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that describe the run: those with the name of a Job's field."""
    return {f.name: getattr(options, f.name) for f in fields(Job) if hasattr(options, f.name)}


def job_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the verb's job gets by name: its own options without those of the run."""
    names = [name for name in VERBS[options.verb].option_names if name not in run_options(options)]
    return {name: getattr(options, name) for name in names}


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

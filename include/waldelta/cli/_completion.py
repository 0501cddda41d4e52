"""``completion``: the script by which a shell completes verbs, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from waldelta.cli._options import COMMAND, build_parser
from waldelta.errors import ConfigError

_FILES, _FOLDERS = frozenset({"file", "pipeline", "result", "place"}), frozenset({"folder"})


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
                kind = shtab.FILE if action.dest in _FILES else shtab.DIRECTORY
                action.complete = kind
    return str(shtab.complete(parser, shell=shell))


def _verbs(parser: argparse.ArgumentParser) -> list[Any]:
    return [
        inner
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        for verb in action.choices.values()
        for inner in (verb, *_verbs(verb))
    ]

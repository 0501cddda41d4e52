"""``waldelta init``: asks the database, and perhaps the user, and writes a pipeline file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from waldelta.cli._options import split_names
from waldelta.cli._output import Output
from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.config.airflow_connection import take_from_airflow
from waldelta.errors import ConfigError
from waldelta.postgres import TableId, connect, conninfo_from_environment, named_loss
from waldelta.quantities import counted, first_of, size
from waldelta.row_filter import parse_row_filter, refused_filter
from waldelta.stages.setup.draft import (
    HEADER,
    Draft,
    FoundTable,
    Inventory,
    facts_of,
    notes_of,
    owners_sql,
    pipeline_name,
    read_inventory,
    why_keyless,
)
from waldelta.stages.setup.facts.publications import PublicationState, read_publications

# Anything else may be a connection string, with a password that others see in the process list.
_CONN_ID = re.compile(r"\A[A-Za-z0-9_.-]+\Z")
_COMMANDS = (
    ("setup", "creates publications and slot"),
    ("sync", "copies the rows that exist"),
    ("consume", "applies the changes since; a schedule repeats it"),
)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_Answer = TypeVar("_Answer")


def run_init(options: argparse.Namespace, output: Output) -> None:
    """Write the pipeline file and the SQL next to it; changes nothing in the database."""
    asks = not (options.tables or options.schema or options.yes or options.sql)
    check_options(options, asks=asks)
    take_from_airflow([options.conn])
    conninfo = conninfo_from_environment(options.conn)
    file = None if options.sql is None else load_pipeline_file(options.sql)
    with named_loss(conninfo), connect(conninfo, "waldelta init") as connection:
        inventory = read_inventory(connection, conninfo)
        names = [] if file is None else file.source.publication_names
        actual = read_publications(connection, names)
        if options.where is not None:
            (table,) = choose_named(inventory, options.tables)
            # PostgreSQL rejects it here, before the owner runs the SQL.
            if refused := refused_filter(connection, table.id, options.where):
                raise ConfigError(f"{table.id}: {refused}: correct --where")
    if file is not None:
        _write_sql_again(options.sql, file, inventory, actual, output)
        return
    if not inventory.tables:
        reasons = [f"{table}: {reason}" for table, reason in inventory.excluded.items()]
        left_out = f"; left out: {first_of(reasons, between='; ')}" if reasons else ""
        raise ConfigError(
            f"database {inventory.server.database!r} has no table that can be replicated: name"
            f" another database in connection {options.conn!r}{left_out}"
        )
    draft = _propose_draft(options, inventory)
    if asks:
        draft = ask(draft)
    draft.load()
    path = options.output or Path(f"{draft.pipeline}.yml")
    sql_path = path.with_suffix(".sql")
    _check_new(path, sql_path)
    sql = draft.as_sql()
    _write(path, draft.as_yaml())
    _write(sql_path, sql)
    document = {
        "file": str(path),
        "sql": str(sql_path),
        "pipeline": draft.pipeline,
        "tables": [str(table.id) for table in draft.tables],
        "left_out": {str(table): reason for table, reason in inventory.excluded.items()},
    }
    output.show(document, _summary(draft, path, sql_path, sql))


def check_options(options: argparse.Namespace, *, asks: bool) -> None:
    """Raise ConfigError for what init can't begin with; never shows what may be a password."""
    if not _CONN_ID.match(options.conn):
        raise ConfigError(
            "init takes the id of an Airflow connection, not a URI, which other users of this"
            " machine could read: put the URI into the environment variable AIRFLOW_CONN_<CONN_ID>"
            " and name CONN_ID"
        )
    if asks and (options.json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise ConfigError(
            "init can't ask questions with --json, nor without a terminal: choose with --tables or"
            " --schema, or take all tables and defaults with --yes"
        )
    if options.where is not None:
        if len(options.tables or ()) != 1 or options.schema:
            raise ConfigError("--where is the filter of one table: name that alone (--tables)")
        parse_row_filter(options.where)
    if options.sql is not None and (options.tables or options.schema or options.output):
        raise ConfigError(
            "--sql writes the SQL of the pipeline file's tables again: leave out --tables, --schema"
            " and --output"
        )
    if options.output is not None:
        _check_new(options.output, options.output.with_suffix(".sql"))


def _propose_draft(options: argparse.Namespace, inventory: Inventory) -> Draft:
    tables: Sequence[FoundTable] = inventory.tables
    if options.tables or options.schema:
        choice = [
            *choose_schemas(inventory, options.schema or ()),
            *choose_named(inventory, options.tables or ()),
        ]
        tables = sorted(dict.fromkeys(choice), key=lambda table: table.id)
    draft = Draft(
        inventory,
        tuple(tables),
        options.conn,
        options.pipeline or pipeline_name(inventory.server.database),
        options.root or _default_root(),
        where=options.where,
    )
    # A name from the command line is the user's own; a default must not be refused.
    return draft if options.pipeline else draft.with_free_names()


def _write_sql_again(
    path: Path,
    file: PipelineFile,
    inventory: Inventory,
    actual: Mapping[str, PublicationState],
    output: Output,
) -> None:
    """Write the SQL of a pipeline file that was edited; raises ConfigError for a file of others."""
    publications, sql_path = file.source.publications, path.with_suffix(".sql")
    tables = [
        table
        for table in inventory.tables
        if any(
            entry.all_tables
            or table.id.schema in entry.schemas
            or entry.entries_of((table.id.schema, table.id.name))
            for entry in publications
        )
    ]
    if sql_path.exists() and not sql_path.read_text(encoding="utf-8").startswith(HEADER):
        raise ConfigError(
            f"{sql_path} exists, and init didn't write it: move it, so that none of it is lost"
        )
    sql = owners_sql(file, inventory, tables, actual)
    sql_path.write_text(sql, encoding="utf-8")
    document = {"file": str(path), "sql": str(sql_path), "pipeline": file.pipeline}
    output.show(document, f"{sql_path}, for the owner or a superuser:\n\n{sql}")


def _default_root() -> str:
    """Returns a root for the lake; the working directory's name may be unfit for one."""
    root = f"file://{Path.cwd() / 'lake'}"
    return root if re.fullmatch(r"file:///[\w./+@~,=-]+", root) else "file:///tmp/lake"


def _check_new(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{path} exists, and init overwrites nothing: name another file (--output)"
            )


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        _check_new(path)
        raise
    except OSError as err:
        raise ConfigError(
            f"{path} can't be written ({err.strerror}): name another file (--output)"
        ) from err


def _summary(draft: Draft, path: Path, sql_path: Path, sql: str) -> str:
    tables = draft.tables
    row_counts = [table.rows for table in tables if table.rows is not None]
    unknown = len(tables) - len(row_counts)
    rows = [
        *([f"≈ {counted(sum(row_counts), 'row')}"] if row_counts else []),
        *(
            [f"{unknown} of them not analyzed yet" if row_counts else "not analyzed yet"]
            * bool(unknown)
        ),
    ]
    total = sum(table.size_bytes + table.toast_bytes for table in tables)
    lines = [f"{path}: {', '.join([counted(len(tables), 'table'), *rows, size(total)])}"]
    lines += [
        f"  {table.id}: {why_keyless(table)}, so only its inserts and truncates are published; see"
        " the file"
        for table in tables
        if not table.identity
    ]
    if excluded := draft.inventory.excluded:
        lines.append(f"  left out, with reasons in the file: {counted(len(excluded), 'table')}")
    is_new = draft.reader not in draft.inventory.roles
    what = f"role {draft.reader}, grants" if is_new else "grants"
    lines += [f"{sql_path}: {what} and publications, for the owner or a superuser:", "", sql]
    lines.append(
        f"Next steps; `waldelta check {path}` first shows problems, plan and cost of the copy:"
    )
    width = max(len(f"waldelta {verb} {path}") for verb, _ in _COMMANDS)
    lines += [f"  {f'waldelta {verb} {path}':<{width}}  # {does}" for verb, does in _COMMANDS]
    return "\n".join(lines)


def choose_named(inventory: Inventory, names: Iterable[str]) -> list[FoundTable]:
    """Returns these tables; raises ConfigError for a name that isn't a table to replicate."""
    return [_table(inventory, name) for name in names]


def choose_schemas(inventory: Inventory, names: Iterable[str]) -> list[FoundTable]:
    """Returns the tables of these schemas; raises ConfigError for one without any."""
    choice = []
    for name in map(_unquote, names):
        tables = [table for table in inventory.tables if table.id.schema == name]
        if not tables:
            raise ConfigError(
                f"schema {name!r} has no table that can be replicated; schemas with some:"
                f" {first_of(inventory.schemas)}"
            )
        choice += tables
    return choice


def choose_answered(inventory: Inventory, answers: Iterable[str]) -> list[FoundTable]:
    """Returns the tables of an answer: numbers in the list (``1``, ``3-5``), tables and schemas."""
    tables = [table for answer in answers for table in _ask_for_tables(inventory, answer)]
    return sorted(dict.fromkeys(tables), key=lambda table: table.id)


def _ask_for_tables(inventory: Inventory, answer: str) -> Iterator[FoundTable]:
    if answer == "all":
        yield from inventory.tables
    elif match := _RANGE.fullmatch(answer):
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= len(inventory.tables):
            raise ConfigError(f"the list has numbers 1 to {len(inventory.tables)}, not {answer}")
        yield from inventory.tables[first - 1 : last]
    elif _unquote(answer) in inventory.schemas:
        yield from choose_schemas(inventory, [answer])
    else:
        yield _table(inventory, answer)


def _table(inventory: Inventory, name: str) -> FoundTable:
    try:
        table_id = TableId.parse(name)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    for table in inventory.tables:
        if table.id == table_id:
            return table
    if (reason := inventory.excluded.get(table_id)) is not None:
        raise ConfigError(f"{table_id} can't be replicated: {reason}")
    for table in inventory.tables:
        if table_id in (leaf.id for leaf in table.leaves):
            raise ConfigError(f"{table_id} is a partition: name its root, {table.id}")
    near = get_close_matches(str(table_id), [str(table.id) for table in inventory.tables], 1)
    hint = f"did you mean {near[0]}?" if near else "check schema and spelling"
    raise ConfigError(
        f"there is no table {table_id} in database {inventory.server.database!r}: {hint}"
    )


def _unquote(name: str) -> str:
    is_quoted = len(name) > 1 and name.startswith('"') and name.endswith('"')
    return name[1:-1].replace('""', '"') if is_quoted else name


def ask(draft: Draft) -> Draft:
    """Returns the draft with the user's answers; raises ConfigError at the end of the input."""
    inventory = draft.inventory
    sys.stdout.write(table_list(inventory))
    tables = _prompt(
        "Tables (numbers, names or schemas, separated by commas)",
        "all",
        lambda answer: choose_answered(inventory, split_names(answer)),
    )
    draft = replace(draft, tables=tuple(tables))
    draft = _prompt(
        "Pipeline name", draft.pipeline, lambda name: _fit(replace(draft, pipeline=name))
    )
    draft = _prompt("Root of the lake", draft.root, lambda root: _fit(replace(draft, root=root)))
    return _prompt(
        "Schedule (cron, UTC)",
        draft.schedule,
        lambda schedule: _fit(replace(draft, schedule=schedule)),
    )


def table_list(inventory: Inventory) -> str:
    """Returns the tables by number, each with what the file will say about it."""
    lines = []
    for number, table in enumerate(inventory.tables, 1):
        lines.append(f"{number:>4}  {table.id}: {facts_of(table)}")
        lines += [f"      {note}" for note in notes_of(table)]
    lines += [f"   -  {table}: left out: {reason}" for table, reason in inventory.excluded.items()]
    return "\n".join([*lines, ""])


def _fit(draft: Draft) -> Draft:
    """Returns a draft that the product reads; raises ConfigError for another one."""
    draft.load()
    return draft


def _prompt(question: str, default: str, read: Callable[[str], _Answer]) -> _Answer:
    while True:
        try:
            answer = input(f"{question} [{default}]: ").strip()
        except EOFError:
            raise ConfigError(
                "the input ended before all questions were answered: choose with --tables or"
                " --schema, or take the defaults with --yes"
            ) from None
        try:
            value = read(answer or default)
            if value:
                return value
        except ConfigError as err:
            sys.stdout.write(f"{err}\n")

"""``waldelta rehearse``: reads what a rehearsal needs, and prints and writes its report."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from waldelta.cli._output import Output
from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.config.airflow_connection import take_from_airflow
from waldelta.errors import ConfigError, WaldeltaError, without_values
from waldelta.jobs import Pipeline
from waldelta.lake import READ_FAILURES
from waldelta.postgres import TableId, conninfo_from_environment
from waldelta.rehearsal.impact_kinds import KINDS
from waldelta.rehearsal.migration import read_migrations
from waldelta.rehearsal.production import Production, read_production, read_schema_file
from waldelta.rehearsal.rehearsal import RehearsalOptions, rehearse

log = logging.getLogger(__name__)


def run_rehearse(options: argparse.Namespace, output: Output) -> bool:
    """Rehearse a migration; returns whether the report has findings of a kind in --fail-on.

    Files are read before the source is asked, and reports are written before the text is printed.
    """
    if options.schema is not None and (options.source is not None or options.sample):
        raise ConfigError("--schema reads no connection: leave --from and --sample out")
    if not options.migration and options.pipeline_change is None:
        raise ConfigError("nothing to rehearse: pass --migration, --pipeline-change or both")
    for path in (options.markdown, options.junit):
        if path is not None:
            try:  # Before the rehearsal, which takes a while.
                is_new = not path.exists()
                path.open("a").close()
                if is_new:
                    path.unlink()
            except OSError as err:
                raise ConfigError(f"{path} can't be written: {err.strerror}") from None
    file, migration = load_pipeline_file(options.file), read_migrations(options.migration)
    changed = None
    if options.pipeline_change is not None:
        changed = options.pipeline_change, load_pipeline_file(options.pipeline_change)
    production = _production(options, file)
    scratch = None if options.scratch is None else _conninfo(options.scratch)
    order = RehearsalOptions(scratch, options.role, options.statement_timeout, changed)
    with _only_progress():
        report = rehearse(file, production, migration, order)
    # What comes after an error isn't rehearsed, so no policy lets it pass.
    kinds = [kind for kind in KINDS if kind == "error" or kind in options.fail_on]
    for path, text in (
        (options.markdown, report.as_markdown(kinds)),
        (options.junit, report.as_junit(kinds)),
    ):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    output.show(report.as_json(), report.as_text(kinds))
    return bool(report.failures(kinds))


@contextmanager
def _only_progress() -> Iterator[None]:
    """Leave the pipeline's own runs out of the log, unless its level is DEBUG."""
    package, rehearsal = (logging.getLogger(name) for name in ("waldelta", "waldelta.rehearsal"))
    levels = package.level, rehearsal.level
    if package.level > logging.DEBUG:
        package.setLevel(logging.CRITICAL)
        rehearsal.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.setLevel(levels[0])
        rehearsal.setLevel(levels[1])


def _production(options: argparse.Namespace, file: PipelineFile) -> Production:
    if options.schema is not None:
        return read_schema_file(options.schema)
    tables = [
        TableId(*table.parts)
        for publication in file.source.publications
        for table in publication.tables
        if not table.is_pattern
    ]
    conn_id = options.source or file.source.conn_id
    production = read_production(_conninfo(conn_id), options.sample, tables)
    is_pipelines = conn_id == file.source.conn_id
    return replace(
        production,
        copies=_copies(file),
        reads_hidden_rows=is_pipelines and production.reads_hidden_rows,
    )


def _copies(file: PipelineFile) -> dict[str, tuple[int, float]]:
    """Returns the rows and seconds of each target's last copy; none where the lake can't be read.

    Then the report says which speed it assumes.
    """
    try:
        if file.target.conn_id is not None:
            take_from_airflow([file.target.conn_id])
        states = Pipeline(file).job().read_states()
    except (WaldeltaError, *READ_FAILURES) as err:
        log.info("the speed of copies is assumed: %s", without_values(err))
        return {}
    return {name: (state.rows, state.seconds) for name, state in states.items()}


def _conninfo(conn_id: str) -> str:
    take_from_airflow([conn_id])
    return conninfo_from_environment(conn_id)

"""Keeps a catalog's entries equal to the lake's targets: what follows a run's commits.

Each entry holds a digest of what it was made from, and the last one a digest of all. So a run finds
out by one request that there is nothing to do, and otherwise changes only what differs. Whatever a
killed run, or a catalog that was away, left undone is therefore done by the next run. Maintenance
reads all entries, and finds those that another program removed. Entries that this pipeline didn't
make are left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from waldelta.catalogs.catalog import (
    DEFINITION,
    LOCATION,
    PIPELINE,
    RESERVED_WORDS,
    TARGET,
    Catalog,
    EntryColumn,
    Registered,
    Registration,
    is_same_location,
    is_within,
)
from waldelta.catalogs.glue import GlueCatalog
from waldelta.catalogs.hive import HiveMetastore
from waldelta.catalogs.unity import UnityCatalog
from waldelta.config import split_table_name
from waldelta.config.airflow_connection import read_connection
from waldelta.config.catalog import CATALOG_CONNECTIONS, RESERVED_SCHEMAS, CatalogSettings
from waldelta.errors import (
    CatalogError,
    CatalogNameRefused,
    CatalogRefused,
    CatalogTableForeign,
    CatalogUnreachable,
    ConfigError,
    PreflightFailed,
    WaldeltaError,
)
from waldelta.findings import Finding, problem, warning
from waldelta.lake import (
    READ_FAILURES,
    DeltaTarget,
    TargetVersion,
    remove_folder,
    staging_folder,
)
from waldelta.lake.delta_statements import query_at
from waldelta.lake.ledger import REMOVED, SYNCED, TableState
from waldelta.pipeline import Job, RunResult, unexpected_error
from waldelta.pipeline.after_commit import commits_of
from waldelta.postgres.comments import Comments, read_comments
from waldelta.quantities import first_of

log = logging.getLogger(__name__)

# After these a catalog is compared even if nothing was committed: an earlier run may have left
# something undone.
_COMPARING_VERBS = frozenset({"consume", "sync", "resync", "maintain"})
# What an entry is made from, besides what its digest has; a change of it renews all entries.
_FORM = 1
_MOST_LISTED = 3
# The entry by which setup finds out whether it may make and remove one.
_PROBE = "waldelta_probe"
CatalogName = tuple[str, str]


def open_catalog(settings: CatalogSettings, environment: Mapping[str, str] = os.environ) -> Catalog:
    """Returns the catalog of ``target.catalog``; it is connected to at the first call.

    Raises ConfigError for a connection that isn't there, can't be read, or doesn't open a catalog
    of this type.
    """
    types, what = CATALOG_CONNECTIONS[settings.type], f"a catalog of type {settings.type}"
    connection = (
        None
        if settings.conn_id is None
        else read_connection(settings.conn_id, types, what, environment)
    )
    if settings.type == "glue":
        return GlueCatalog(connection, settings.name)
    assert connection is not None  # noqa: S101 - the settings need one for these types
    if settings.type == "hive":
        return HiveMetastore(connection, settings.name)
    return UnityCatalog(connection, str(settings.name))


def register_targets(job: Job, result: RunResult) -> None:
    """Register the targets after a run that committed, or may have something left to do.

    Whatever fails is a warning of the run: its data is in the lake.
    """
    settings = job.pipeline.target.catalog
    if settings is None or not (result.verb in _COMPARING_VERBS or commits_of(result.document())):
        return
    try:
        registrar = _Registrar(job, settings, open_catalog(settings))
        failures = registrar.run(is_full=result.verb == "maintain")
    except Exception as err:
        error = unexpected_error("the catalog", err)
        log.warning("catalog=%s not compared: %s", settings.type, error, exc_info=error is not err)
        result.warn(
            [f"tables aren't registered until a run reaches the {settings.type} catalog: {error}"]
        )
        return
    for name, failure in failures.items():
        log.warning("table=%s not registered: %s", name, failure)
    result.warn(
        f"{name} isn't registered in the {settings.type} catalog: {failure}"
        for name, failure in failures.items()
    )


@dataclass
class CatalogNames:
    """Schema and name of each target in a catalog, and the errors of targets that can't have one.

    ``views`` names the targets' views of a consistent cut, if there are any.
    """

    tables: dict[str, CatalogName] = field(default_factory=dict)
    views: dict[str, CatalogName] = field(default_factory=dict)
    refusals: dict[str, CatalogNameRefused] = field(default_factory=dict)

    @classmethod
    def find(
        cls, catalog: Catalog, settings: CatalogSettings, names: Mapping[str, str]
    ) -> CatalogNames:
        """Returns the catalog_names of targets by their ``names`` in the lake.

        Of two targets that would have one catalog_name, the first by name gets it.
        """
        catalog_names, tables = cls(), dict[CatalogName, str]()
        for table, name in sorted(names.items()):
            try:
                catalog_name = catalog_name_of(catalog, settings, name)
                if (holder := tables.setdefault(catalog_name, table)) != table:
                    raise CatalogNameRefused(
                        f"the catalog can't distinguish its name from that of {holder}"
                        f" ({'.'.join(catalog_name)}): give one of them another name"
                        " (target.tables, name), or add {schema} to target.catalog.schema"
                    )
                if settings.cut_views:
                    catalog_names.views[table] = _view_of(catalog, catalog_name)
            except CatalogNameRefused as err:
                catalog_names.refusals[table] = err
            else:
                catalog_names.tables[table] = catalog_name
        return catalog_names


def catalog_name_of(catalog: Catalog, settings: CatalogSettings, name: str) -> CatalogName:
    """Returns the schema and name in the catalog of a target with this name in the lake.

    Raises CatalogNameRefused.
    """
    source_schema, table = split_table_name(name)
    schema = catalog.stored_name(settings.schema_of(source_schema))
    if schema in RESERVED_SCHEMAS:
        raise CatalogNameRefused(
            f"{schema} is the catalog's own schema: write another, such as raw_{{schema}}"
            " (target.catalog.schema)"
        )
    return schema, catalog.stored_name(table)


def _names(job: Job, tables: Iterable[str]) -> dict[str, str]:
    return {table: job.lake.stored_name(table) for table in tables}


def read_entries(
    catalog: Catalog, catalog_names: Collection[CatalogName]
) -> dict[CatalogName, Registered]:
    """Returns the catalog's entries with these names."""
    names: dict[str, list[str]] = {}
    for schema, name in catalog_names:
        names.setdefault(schema, []).append(name)
    return {
        (schema, name): entry
        for schema, of in names.items()
        for name, entry in catalog.tables(schema, of).items()
    }


@dataclass
class _Registrar:
    job: Job
    settings: CatalogSettings
    catalog: Catalog
    failures: dict[str, WaldeltaError] = field(default_factory=dict)
    _schemas: set[str] = field(default_factory=set)

    def run(self, *, is_full: bool) -> dict[str, WaldeltaError]:
        """Register all targets; returns the error of each target whose entry couldn't be written.

        Raises an error that stops all targets. The last entry's digest covers all entries, so that
        the others aren't read while it is right; ``is_full``: all are read.
        """
        rows = self.job.ledger.table_rows()
        latest = {state.table_name: state for state in rows}
        gone = {name for name, state in latest.items() if state.status == REMOVED}
        synced = {name: state for name, state in latest.items() if state.status == SYNCED}
        catalog_names = CatalogNames.find(self.catalog, self.settings, _names(self.job, synced))
        self.failures |= catalog_names.refusals
        former = CatalogNames.find(self.catalog, self.settings, _names(self.job, gone))
        comments = _comments(self.job, synced.values())
        digests = {
            name: _digest(self.job, synced[name], comments) for name in sorted(catalog_names.tables)
        }
        if is_full or not self._is_unchanged(catalog_names.tables, former.tables, digests):
            self._compare(synced, catalog_names.tables, former.tables, digests, comments)
            self._drop_former(rows, {*catalog_names.tables.values()})
        if self.settings.cut_views:
            self._make_views({**former.views, **catalog_names.views}, catalog_names.tables)
        return self.failures

    def _drop_former(
        self, rows: Iterable[TableState], catalog_names: Collection[CatalogName]
    ) -> None:
        """Drop the entries of targets that were moved, at the names that they had before."""
        former = {(row.table_name, row.stored_name or row.table_name) for row in rows}
        for table, name in sorted(former - {*_names(self.job, (t for t, _ in former)).items()}):
            with suppress(CatalogNameRefused):
                catalog_name = catalog_name_of(self.catalog, self.settings, name)
                candidates = {catalog_name, _view_of(self.catalog, catalog_name)} - {*catalog_names}
                for entry in read_entries(self.catalog, candidates).values():
                    self._drop(table, entry)

    def _is_unchanged(
        self,
        catalog_names: Mapping[str, CatalogName],
        gone: Mapping[str, CatalogName],
        digests: Mapping[str, str],
    ) -> bool:
        if not digests:
            return not gone
        last = [*digests][-1]
        entry = read_entries(self.catalog, [catalog_names[last]]).get(catalog_names[last])
        return self._is_current(entry, last, _digest_of_all(catalog_names, gone, digests))

    def _is_current(self, entry: Registered | None, name: str, digest: str) -> bool:
        return (
            entry is not None
            and is_own(self.job, entry)
            and is_same_location(entry.location, self.job.lake.target(name).uri)
            and entry.properties.get(DEFINITION) == digest
        )

    def _compare(
        self,
        states: Mapping[str, TableState],
        catalog_names: Mapping[str, CatalogName],
        gone: Mapping[str, CatalogName],
        digests: Mapping[str, str],
        comments: Comments,
    ) -> None:
        entries = read_entries(self.catalog, {*catalog_names.values(), *gone.values()})
        self._each(gone, lambda name: self._drop(name, entries.get(gone[name])))

        def register(name: str, digest: str) -> None:
            self._register(
                states[name],
                catalog_names[name],
                entries.get(catalog_names[name]),
                digest,
                comments,
            )

        if not digests:
            return
        *names, last = digests
        self._each(names, lambda name: register(name, digests[name]))
        is_all = self.failures.keys().isdisjoint({*names, *gone})
        digest = _digest_of_all(catalog_names, gone, digests) if is_all else digests[last]
        self._each([last], lambda name: register(name, digest))

    def _each(self, names: Iterable[str], act: Callable[[str], None]) -> None:
        for name in names:
            try:
                act(name)
            except CatalogUnreachable:
                raise
            except Exception as err:
                self.failures.setdefault(name, unexpected_error(name, err))

    def _register(
        self,
        state: TableState,
        catalog_name: CatalogName,
        current: Registered | None,
        digest: str,
        comments: Comments,
    ) -> None:
        target = self.job.lake.target(state.table_name)
        if current is not None:
            check_own(self.job, current, state.table_name)
            if self._is_current(current, state.table_name, digest):
                return
        properties = _marks(self.job, state.table_name, target, digest) | {
            "waldelta.mode": state.mode or "mirror",
            "waldelta.key": ",".join(state.key_columns),
        }
        self._put(
            Registration(
                *catalog_name,
                target.uri,
                columns_of(target.open(), state.table_name, comments),
                comments.get((state.table_name, None)),
                properties,
            ),
            current,
        )
        log.info("table=%s registered as %s", state.table_name, ".".join(catalog_name))

    def _put(self, entry: Registration, current: Registered | None) -> None:
        if current is not None:
            self.catalog.alter(entry, current)
            return
        if entry.schema not in self._schemas:
            self.catalog.create_schema(entry.schema, {PIPELINE: self.job.pipeline.pipeline})
            self._schemas.add(entry.schema)
        self.catalog.create(entry)

    def _drop(self, table: str, current: Registered | None) -> None:
        if (
            current is not None
            and is_own(self.job, current)
            and current.properties.get(TARGET) == table
        ):
            self.catalog.drop(current)
            log.info("table=%s removed from the catalog: it isn't published", table)

    def _make_views(self, views: Mapping[str, CatalogName], targets: Collection[str]) -> None:
        """Let each view read its target as of the newest consistent cut; views of other targets
        go.
        """
        cut = self.job.ledger.last_cut()
        versions = {of.table_name: of.version for of in cut.targets} if cut is not None else {}
        entries = read_entries(self.catalog, views.values())

        def make(name: str) -> None:
            current = entries.get(views[name])
            if name not in targets:
                self._drop(name, current)
            elif (version := versions.get(name)) is not None:
                self._make_view(name, views[name], version, current)

        self._each(views, make)

    def _make_view(
        self, table: str, catalog_name: CatalogName, version: int, current: Registered | None
    ) -> None:
        target = self.job.lake.target(table)
        query = query_at(target, version)
        digest = _hash([_FORM, query])
        if current is not None:
            check_own(self.job, current, table)
            if current.properties.get(DEFINITION) == digest:
                return
        marks = _marks(self.job, table, target, digest)
        columns = columns_of(target.open(version), table, {})
        self._put(Registration(*catalog_name, target.uri, columns, None, marks, query), current)


def _view_of(catalog: Catalog, catalog_name: CatalogName) -> CatalogName:
    return catalog.stored_name(f"{catalog_name[0]}_cut"), catalog_name[1]


def is_own(job: Job, entry: Registered) -> bool:
    """Returns whether this pipeline made an entry, for a folder of its lake."""
    is_marked = entry.properties.get(PIPELINE) == job.pipeline.pipeline
    return is_marked and is_within(entry.location, job.pipeline.target.root)


def check_own(job: Job, entry: Registered, table: str) -> None:
    """Raise CatalogTableForeign for an entry that this pipeline didn't make."""
    if not is_own(job, entry):
        maker = entry.properties.get(PIPELINE)
        whose = f"pipeline {maker} made it" if maker else "waldelta didn't make it"
        raise CatalogTableForeign(
            f"the catalog has another {entry.label} ({whose}, at"
            f" {entry.location or 'no location'}): drop or rename it there, or set"
            f" target.catalog.schema, and the next run registers {table}"
        )


def columns_of(table: TargetVersion, name: str, comments: Comments) -> tuple[EntryColumn, ...]:
    """Returns the columns of a version as Delta's log has them, with the source's comments."""
    fields, types = table.definition.columns, table.spark_types
    return tuple(
        EntryColumn(
            column,
            types[column],
            of["type"],
            bool(of.get("nullable", True)),
            comments.get((name, column)),
        )
        for column, of in fields.items()
    )


def _marks(job: Job, table: str, target: DeltaTarget, digest: str) -> dict[str, str]:
    return {
        PIPELINE: job.pipeline.pipeline,
        TARGET: table,
        LOCATION: target.uri,
        DEFINITION: digest,
    }


def _digest(job: Job, state: TableState, comments: Comments) -> str:
    """Returns what an entry is made from, by the ledger, which needs no look at the Delta log."""
    name, uri = state.table_name, job.lake.target(state.table_name).uri
    columns = [[c.name, c.spark_type, comments.get((name, c.name))] for c in state.columns]
    facts = [job.pipeline.target.metadata_columns, state.mode, state.key_columns, state.root_id]
    return _hash([_FORM, uri, columns, comments.get((name, None)), facts])


def _digest_of_all(
    catalog_names: Mapping[str, CatalogName],
    gone: Mapping[str, CatalogName],
    digests: Mapping[str, str],
) -> str:
    return _hash([sorted(catalog_names.items()), sorted(gone.items()), sorted(digests.items())])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _comments(job: Job, states: Collection[TableState]) -> Comments:
    """Returns the source's comments, by target and by the columns' names in the lake."""
    tables = {state.table_name: state.source_table or state.table_name for state in states}
    if not tables:
        return {}
    with job.source.connect("catalog") as connection:
        comments = read_comments(connection, tables)
    renames: dict[tuple[str, str | None], str] = {
        (state.table_name, column.source_name): column.name
        for state in states
        for column in state.columns
        if column.source_name is not None
    }
    return {
        (table, renames.get((table, column), column)): text
        for (table, column), text in comments.items()
    }


# --- what `check` says about the catalog


def judge_catalog(job: Job, planned: Mapping[str, Collection[str]]) -> list[Finding]:
    """Returns what keeps the targets that are planned from being registered, which names readers
    must quote, and where the catalog and the lake differ.

    ``planned`` has the columns of each target.
    """
    settings = job.pipeline.target.catalog
    if settings is None:
        return []
    latest = {state.table_name: state for state in job.ledger.table_rows()}
    synced = {name for name, state in latest.items() if state.status == SYNCED}
    try:
        catalog = open_catalog(settings)
        catalog_names = CatalogNames.find(catalog, settings, _names(job, synced.union(planned)))
        entries = read_entries(
            catalog, {*catalog_names.tables.values(), *catalog_names.views.values()}
        )
    except CatalogUnreachable as err:
        return [warning(f"target.catalog: {err}: tables are registered once it answers")]
    except (CatalogRefused, ConfigError) as err:
        return [problem(f"target.catalog: {err}")]
    findings = [problem(f"{name}: {err}") for name, err in catalog_names.refusals.items()]
    findings += _judge_words(catalog_names.tables, planned)
    for name, catalog_name in catalog_names.tables.items():
        findings += _differences(job, name, catalog_name, entries.get(catalog_name), name in synced)
    for name, catalog_name in catalog_names.views.items():
        findings += _judge_owner(job, name, entries.get(catalog_name))
    return findings


def _judge_owner(job: Job, name: str, entry: Registered | None) -> Iterator[Finding]:
    try:
        if entry is not None:
            check_own(job, entry, name)
    except CatalogError as err:
        yield problem(f"{name}: {err}")


def _judge_words(
    catalog_names: Mapping[str, CatalogName], planned: Mapping[str, Collection[str]]
) -> Iterator[Finding]:
    """Yields a warning that lists the names which readers must quote, if there are any."""
    names = [
        *(
            f"{'.'.join(catalog_name)}"
            for catalog_name in catalog_names.values()
            if not RESERVED_WORDS.isdisjoint(catalog_name)
        ),
        *(
            f"{'.'.join(catalog_name)}.{column}"
            for name, catalog_name in catalog_names.items()
            for column in planned.get(name, ())
            if column.lower() in RESERVED_WORDS
        ),
    ]
    if names:
        yield warning(
            f"target.catalog: SQL reserves a word in {first_of(names, _MOST_LISTED)}: readers by"
            ' name quote it (`order` in Spark and Hive, "order" in Trino and Athena), or give'
            " it another name (target.tables: name, columns)"
        )


def _differences(
    job: Job, name: str, catalog_name: CatalogName, entry: Registered | None, is_synced: bool
) -> Iterator[Finding]:
    if entry is None:
        if is_synced:
            yield warning(
                f"{name} isn't in the catalog as {'.'.join(catalog_name)}: the next run registers"
                " it, or maintenance, if another program removed it"
            )
        return
    if foreign := [*_judge_owner(job, name, entry)]:
        yield from foreign
        return
    target = job.lake.target(name)
    if not is_same_location(entry.location, target.uri):
        yield warning(
            f"{name}: the catalog has {entry.location}, and the target is {target.uri}: the next"
            " run, or maintenance, corrects it"
        )
    elif is_synced:
        yield from _column_differences(name, entry, target)


def _column_differences(name: str, entry: Registered, target: DeltaTarget) -> Iterator[Finding]:
    try:
        columns = {column.lower() for column in target.open().spark_types}
    except READ_FAILURES:  # Its next run names it.
        return
    if differing := sorted(columns ^ set(entry.columns)):
        yield warning(
            f"{name}: {entry.label} in the catalog has other columns than the target"
            f" ({first_of(differing, _MOST_LISTED, ', ')}): a reader by name may lack them; drop"
            " the entry, and maintenance registers it again"
        )


# --- what `setup` tries in the catalog


def check_rights(job: Job, planned: Iterable[str]) -> None:
    """Create missing schemas of targets, and in each schema an entry, which is removed again.

    Raises PreflightFailed with what the catalog refuses. A catalog that is away is no error.
    """
    settings = job.pipeline.target.catalog
    if settings is None:
        return
    catalog, refusals = open_catalog(settings), []
    catalog_names = CatalogNames.find(catalog, settings, _names(job, planned))
    for schema in sorted(
        {schema for schema, _ in [*catalog_names.tables.values(), *catalog_names.views.values()]}
    ):
        try:
            _try_entry(job, catalog, schema)
        except CatalogUnreachable as err:
            log.warning("catalog=%s rights not tried: %s", settings.type, err)
            return
        except CatalogRefused as err:
            refusals.append(f"target.catalog: {err}")
    if refusals:
        raise PreflightFailed(refusals)


def _try_entry(job: Job, catalog: Catalog, schema: str) -> None:
    marks = {PIPELINE: job.pipeline.pipeline}
    # A metastore makes the folder, and Unity Catalog takes none that another entry has.
    folder = staging_folder(job.lake, "catalog", 0, 0, "")
    column = EntryColumn("id", "int", "integer")
    catalog.create_schema(schema, marks)
    try:
        with suppress(CatalogTableForeign):  # A setup that was killed left its own.
            catalog.create(Registration(schema, _PROBE, folder, (column,), None, marks))
        probe = catalog.tables(schema, [_PROBE]).get(_PROBE)
        if probe is not None and PIPELINE in probe.properties:
            catalog.drop(probe)
    finally:
        remove_folder(folder)

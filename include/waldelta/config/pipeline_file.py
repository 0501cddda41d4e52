"""The pipeline file: what an engineer writes, validated once, with all problems listed.

The file is the stable surface; every other module takes the validated models below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from waldelta.config._schedule import Schedule
from waldelta.config._validation_errors import StrictModel, problems, read_yaml
from waldelta.config._variables import expand
from waldelta.config.quality import Quality, check_folder_uri
from waldelta.config.target_mode import TargetMode
from waldelta.config.type_options import TableTypeOptions, TypeOptions
from waldelta.errors import ConfigError
from waldelta.remedies import ANY_ERROR, ERRORS

SchemaPolicy = Literal["evolve", "fail", "ignore"]
Operation = Literal["insert", "update", "delete", "truncate"]
TableName = Annotated[
    str, Field(description="schema-qualified name, as PostgreSQL prints it: public.flights")
]

_IDENTIFIER = re.compile(r"\A[a-z][a-z0-9_]*\Z")
_SLOT = re.compile(r"\A[a-z0-9_]{1,63}\Z")
# URLs drop or encode these characters, and Hadoop takes some for patterns: a lake could end up in
# two folders, or in another one.
_UNFIT_IN_ROOT = frozenset(" %#?\\|[]{}*^")
# The most that a slow server's statement timeout is raised to, unless the file sets more.
LONGEST_TIMEOUT_S = 3 * 3600
_NAME_PART = re.compile(r'"(?:[^"]|"")+"|[^".\s]+')


def split_table_name(name: str) -> tuple[str, str]:
    """Split ``schema.table``; parts with dots or upper case are double-quoted as in SQL.

    >>> split_table_name('public."odd.name"')
    ('public', 'odd.name')
    """
    parts = _NAME_PART.findall(name)
    if len(parts) != 2 or ".".join(parts) != name:
        raise ValueError(f"{name!r} is not a schema-qualified table name: write schema.table")
    schema, table = (p[1:-1].replace('""', '"') if p.startswith('"') else p for p in parts)
    return schema, table


class TableEntry(StrictModel):
    """A table of a publication."""

    name: TableName
    where: str | None = Field(
        None, description="row filter, evaluated by the publisher (PostgreSQL expression)"
    )
    columns: tuple[str, ...] | None = Field(
        None, min_length=1, description="column list; all columns without it"
    )

    @field_validator("name")
    @classmethod
    def _qualified(cls, value: str) -> str:
        split_table_name(value)
        return value

    @property
    def parts(self) -> tuple[str, str]:
        """Schema and table name, unquoted."""
        return split_table_name(self.name)


class Publication(StrictModel):
    """A publication that the slot reads: tables, schemas or all tables, and the operations."""

    name: str = Field(min_length=1, max_length=63)
    publish: tuple[Operation, ...] = ("insert", "update", "delete", "truncate")
    publish_via_partition_root: bool = False
    publish_generated_columns: Literal["none", "stored"] = Field(
        "none",
        description=(
            "stored: stored generated columns are published too, where no column list says so"
            " (PostgreSQL 18)"
        ),
    )
    tables: tuple[TableEntry, ...] = ()
    all_tables: bool = False
    schemas: tuple[str, ...] = ()
    manage: bool = Field(
        True, description="false: the publication exists already and is never altered"
    )
    accept_future_tables: bool = Field(
        False, description="needed for all_tables or schemas that publish updates or deletes"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.all_tables and (self.tables or self.schemas):
            raise ValueError("all_tables stands alone: remove tables and schemas")
        if self.manage and not (self.all_tables or self.tables or self.schemas):
            raise ValueError(
                "name what it publishes: tables, schemas or all_tables (or manage: false)"
            )
        names = [t.name for t in self.tables]
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"listed twice: {', '.join(doubled)}")
        return self


class Options(StrictModel):
    """Options of the pgoutput plugin and of consumption."""

    binary: bool = False
    streaming: Literal["off", "on", "parallel"] = "off"
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"
    messages: bool = False
    acknowledge: Literal["get", "peek", "advance"] = "get"

    @field_validator("streaming", mode="before")
    @classmethod
    def _yaml_boolean(cls, value: object) -> object:
        # YAML reads a bare on or off as a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Source(StrictModel):
    """The PostgreSQL server, its slot and publications."""

    conn_id: str = Field(
        min_length=1, description="Airflow connection, or the variable AIRFLOW_CONN_<ID>"
    )
    read_from: str | None = Field(
        None,
        min_length=1,
        description=(
            "Airflow connection of a standby of conn_id's server (PostgreSQL 16) that has the slot"
            " and is read in the primary's place; copies and comparisons stay on the primary"
        ),
    )
    slot: str = Field(description="name of the logical replication slot")
    adopt_slot: bool = Field(
        False,
        description=(
            "true: take over a slot that exists and that somebody else has read; nobody else may"
            " read it then"
        ),
    )
    failover: bool | None = Field(
        None,
        description=(
            "true: PostgreSQL keeps the slot on standbys too, so that it outlives a failover"
            " (PostgreSQL 17); default: a slot that exists stays as it is, a new one isn't kept"
            " there"
        ),
    )
    publications: tuple[Publication, ...] = Field(min_length=1)
    options: Options = Options()

    @field_validator("slot")
    @classmethod
    def _slot_name(cls, value: str) -> str:
        if not _SLOT.match(value):
            raise ValueError("slot names have 1 to 63 lower-case letters, digits and underscores")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = self.publication_names
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"publications listed twice: {', '.join(doubled)}")
        return self

    @model_validator(mode="after")
    def _one_server_has_the_slot(self) -> Self:
        if self.read_from is None:
            return self
        if self.failover is not None:
            raise ValueError(
                "read_from and failover exclude each other: a standby's own slot is kept on no"
                " other server"
            )
        if self.read_from == self.conn_id:
            raise ValueError(
                "read_from is conn_id: name the standby's connection, or leave it out to read from"
                " the primary"
            )
        return self

    @property
    def conn_ids(self) -> list[str]:
        """Returns the connections that a run needs: the primary's, and its standby's if
        configured.
        """
        return [self.conn_id, *([self.read_from] if self.read_from is not None else [])]

    @property
    def publication_names(self) -> list[str]:
        """Returns the publications' names, as listed."""
        return [publication.name for publication in self.publications]


class TargetTable(StrictModel):
    """The source mapping of one target, and its mode and types."""

    source: TableName | None = Field(
        None,
        alias="from",
        description=(
            "the published table that feeds this target; default: the one of its name. With the"
            " name of one of that table's partitions, the target holds what the partition holds"
        ),
    )
    partition_root: bool = Field(
        False,
        description="true: gather the published leaves of this partitioned table in one target",
    )
    mode: TargetMode = Field(
        "mirror",
        description=(
            "mirror: the source's rows; soft_delete: deleted rows stay, marked; history: every"
            " version of a row with the time that it was valid; changelog: every change is appended"
        ),
    )
    copied: bool = Field(
        True,
        alias="copy",
        description=(
            "false: existing rows aren't copied, as with PostgreSQL's copy_data = false: the target"
            " begins empty and gets changes only"
        ),
    )
    schema_changes: SchemaPolicy | None = Field(
        None, description="what to do when the source's columns change, for this table"
    )
    types: TableTypeOptions = Field(
        TableTypeOptions(), description="types of the lake for this table"
    )
    deletion_vectors: bool | None = Field(
        None,
        description="mark changed rows as gone instead of writing their files anew, for this table",
    )
    where: str | None = Field(
        None,
        min_length=1,
        description=(
            "filter of this target, evaluated in Spark as PostgreSQL would (PostgreSQL expression)"
        ),
    )

    @field_validator("source")
    @classmethod
    def _qualified(cls, value: str | None) -> str | None:
        if value is not None:
            split_table_name(value)
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.source is not None and self.partition_root:
            raise ValueError(
                "from and partition_root exclude each other: a gathered target is fed by its leaves"
            )
        if self.mode != "mirror" and self.partition_root:
            raise ValueError(
                f"mode {self.mode} and partition_root exclude each other: publish the table via its"
                " root (publish_via_partition_root: true), and leave partition_root out"
            )
        if self.mode != "mirror" and not self.copied:
            raise ValueError(
                f"mode {self.mode} and copy: false exclude each other: leave one of them out"
            )
        return self


class Target(StrictModel):
    """The lake."""

    root: str = Field(
        description=(
            "URI of the lake's root folder: file:///…, s3a://…, abfss://…; ${WALDELTA_NAME}: from"
            " the environment"
        )
    )
    accept_unsafe_store: bool = Field(
        False,
        description=(
            "true: take an s3a:// root although Spark's log store may overwrite commits of other"
            " writers"
        ),
    )
    tables: dict[str, TargetTable] = Field({})
    schema_changes: SchemaPolicy = Field(
        "evolve",
        description=(
            "evolve: the target follows, copied again where the stream doesn't tell; fail: it"
            " stops; ignore: it keeps its columns"
        ),
    )
    copy_within_run_mb: int = Field(
        64,
        ge=0,
        description=(
            "up to which size a table that has to be copied again is copied by the CDC run itself"
        ),
    )
    drift: Literal["repair", "report"] | None = Field(
        None,
        description=(
            "when a filter, a column list or the partitions changed: repair mends the table, report"
            " tells; default: repair what the pipeline file changed, report what changed in"
            " publications with manage: false"
        ),
    )
    metadata_columns: bool = Field(
        True, description="keep _wd_lsn, _wd_commit_ts and _wd_raw in the targets"
    )
    types: TypeOptions = Field(
        TypeOptions(), description="types of the lake where there is a choice"
    )
    deletion_vectors: bool = Field(
        False,
        description=(
            "mark changed rows as gone instead of writing their files anew: cheaper runs, but not"
            " every reader can"
        ),
    )

    _written_root: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _as_written(cls, data: Any, validate: Callable[[Any], Self]) -> Self:
        target = validate(data)
        target._written_root = str(data["root"]) if isinstance(data, dict) else target.root  # noqa: SLF001 - its own
        return target

    @property
    def written_root(self) -> str:
        """Returns the root as the file has it, with environment variables not replaced."""
        return self._written_root

    @field_validator("root")
    @classmethod
    def _uri(cls, value: str) -> str:
        value = expand(value)
        check_folder_uri(value)
        if "://" not in value:
            raise ValueError(f"root is a URI: write file://{Path(value).absolute()}")
        if unfit := sorted(
            char for char in set(value) if char in _UNFIT_IN_ROOT or not char.isprintable()
        ):
            raise ValueError(
                f"root contains {''.join(unfit)!r}, which Spark and delta-rs read differently:"
                " rename the folder"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _raw_has_a_place(self) -> Self:
        chosen = [self.types, *(table.types.over(self.types) for table in self.tables.values())]
        if not self.metadata_columns and any(options.need_raw for options in chosen):
            raise ValueError(
                "types other than string need metadata_columns: true, since what they can't hold"
                " stands in _wd_raw"
            )
        return self

    @model_validator(mode="after")
    def _modes_have_their_columns(self) -> Self:
        kept = sorted(name for name, table in self.tables.items() if table.mode != "mirror")
        if kept and not self.metadata_columns:
            raise ValueError(
                "only mirrors do without metadata columns: set metadata_columns: true for"
                f" {', '.join(kept)}"
            )
        return self

    @model_validator(mode="after")
    def _tables_are_named(self) -> Self:
        for name, table in self.tables.items():
            if table.source is not None or table.partition_root:
                split_table_name(name)
        return self

    def types_of(self, table_name: str) -> TypeOptions:
        """Returns the type options of one table, named as PostgreSQL prints it."""
        own = self.tables.get(table_name)
        return own.types.over(self.types) if own else self.types

    def deletion_vectors_of(self, table: str) -> bool:
        """Returns whether this table's commits write deletion vectors."""
        own = self.tables.get(table)
        return (
            self.deletion_vectors
            if own is None or own.deletion_vectors is None
            else own.deletion_vectors
        )

    def mode_of(self, table: str) -> TargetMode:
        """Returns the mode of this table's target."""
        own = self.tables.get(table)
        return own.mode if own else "mirror"

    def where_of(self, table: str) -> str | None:
        """Returns the filter of this table's target, as written."""
        own = self.tables.get(table)
        return own.where if own else None

    def copies(self, table: str) -> bool:
        """Returns whether syncs copy this table's rows."""
        own = self.tables.get(table)
        return own is None or own.copied

    def recopies(self, table: str) -> bool:
        """Returns whether runs copy this table again by themselves where only a copy is exact."""
        return self.policy_of(table) == "evolve" and self.copies(table)

    def policy_of(self, table: str) -> SchemaPolicy:
        """Returns what to do when this table's columns change."""
        own = self.tables.get(table)
        return (own.schema_changes if own else None) or self.schema_changes


class Batch(StrictModel):
    """Limits of one read window of the slot, and of its apply."""

    max_changes: int = Field(1_000_000, ge=1)
    wal_window_mb: int = Field(512, ge=16, description="WAL decoded by one call at the most")
    statement_timeout_s: int = Field(600, ge=1)
    apply_timeout_minutes: int = Field(
        60,
        ge=1,
        description="Airflow's limit for the task apply, behind which the next landing waits",
    )

    @property
    def longest_timeout_s(self) -> int:
        """Returns the longest timeout of one call, once the timeout was raised."""
        return max(LONGEST_TIMEOUT_S, self.statement_timeout_s)


class Maintenance(StrictModel):
    """The _maintenance DAG."""

    schedule: Schedule | None = "17 3 * * *"
    keep_changes_days: int = Field(30, ge=1, description="how far back the change log reaches")
    keep_versions_hours: int = Field(
        168,
        ge=168,
        description=(
            "time travel and consistent cuts reach back so far; Delta refuses less than a week"
        ),
    )

    @property
    def keeps_rows(self) -> timedelta:
        """Returns how far back the ledger's rows go."""
        return max(
            timedelta(days=self.keep_changes_days), timedelta(hours=self.keep_versions_hours)
        )


class SlotLimits(StrictModel):
    """When the slot's backlog is reported: by the WAL it keeps, and by the time until its limit."""

    warn_mb: int = Field(5_000, ge=1)
    critical_mb: int = Field(50_000, ge=1)
    disk_budget_mb: int | None = Field(
        None,
        ge=1,
        description=(
            "WAL that the slot may hold back at most; for forecasts, where the server sets no limit"
        ),
    )
    warn_hours: float = Field(
        4,
        ge=0,
        description="warn when the limit will be reached sooner, should the slot stand still",
    )
    critical_hours: float = Field(1, ge=0)


class Notification(StrictModel):
    """A notifier for failures of some error classes."""

    # Not "on", which YAML reads as true.
    errors: tuple[str, ...] = Field(
        min_length=1,
        description=(
            "classes of errors, each with those below it (SlotError); any: every failure of a task"
        ),
    )
    notifier: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$",
        description="Airflow's notifier: the class with its module",
    )
    arguments: dict[str, Any] = Field(
        {}, description="its arguments; templates find the failure as {{ failure.message }}"
    )

    @field_validator("errors")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name != ANY_ERROR and name not in ERRORS:
                near = get_close_matches(name, [ANY_ERROR, *ERRORS], 1)
                hint = f"write {near[0]}" if near else "README.md lists them"
                raise ValueError(f"there is no class of errors {name!r}: {hint}")
        return value


class PipelineFile(StrictModel):
    """One pipeline: from a source's publications through one slot to one lake."""

    pipeline: str = Field(description="name; prefix of the DAG ids")
    source: Source
    target: Target
    schedule: Schedule | None = Field(
        "*/5 * * * *", description="cron expression of the CDC DAG; null: triggered by hand"
    )
    owner: str = "data-engineering"
    tags: tuple[str, ...] = ()
    spark_conn_id: str = Field(
        "waldelta_spark", description="Airflow connection of type spark or spark_connect"
    )
    batch: Batch = Batch()
    quality: Quality = Quality()
    maintenance: Maintenance = Maintenance()
    slot_limits: SlotLimits = SlotLimits()
    row_values: Literal["read", "trigger", "edit"] = Field(
        "read",
        description=(
            "which permission on the CDC DAG shows values of rows on Airflow's pages: in"
            " quarantine, that differ, in reports"
        ),
    )
    notify: tuple[Notification, ...] = Field(
        (), description="who is told of a task's failure, by the class of its error"
    )

    @field_validator("pipeline")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _IDENTIFIER.match(value):
            raise ValueError(
                "a pipeline's name has lower-case letters, digits and underscores, a letter first"
            )
        return value

    @property
    def pool(self) -> str:
        """Returns the Airflow pool in which this slot's runs are scheduled."""
        return f"waldelta_{self.source.slot}"


def load_pipeline_file(path: str | Path) -> PipelineFile:
    """Read and validate a pipeline file; raises ConfigError with every problem and its place.

    Folders in it are absolute afterwards.
    """
    path = Path(path)
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(
            f"pipeline file {path} can't be read ({err.strerror}): check the path"
        ) from err
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"pipeline file {path} is not text in UTF-8 (byte {err.start}): check the path"
        ) from err
    except yaml.YAMLError as err:
        raise ConfigError(f"pipeline file {path} is not valid YAML: {err}") from err
    if not isinstance(document, dict):
        raise ConfigError(
            f"pipeline file {path} is empty or not a mapping: start with 'pipeline: <name>'"
        )
    try:
        pipeline = PipelineFile.model_validate(document)
    except ValidationError as err:
        lines = "\n".join(f"  - {problem}" for problem in problems(err, PipelineFile))
        raise ConfigError(f"pipeline file {path} is refused:\n{lines}") from err
    return pipeline.model_copy(update={"quality": _placed(pipeline, path.absolute().parent)})


def _placed(pipeline: PipelineFile, folder: Path) -> Quality:
    """Returns the quality settings with absolute folders, because Airflow's tasks run elsewhere."""
    quality = pipeline.quality
    default = folder.parent / "expectations" / pipeline.pipeline
    suites = folder / quality.suites if quality.suites else default if default.is_dir() else None
    if suites is not None and not suites.is_dir():
        raise ConfigError(
            f"quality.suites of pipeline {pipeline.pipeline!r}: there is no folder {suites}: create"
            " it, or remove the key"
        )
    docs = quality.data_docs
    if docs is not None and "://" not in docs:
        docs = str(folder / docs)
    return quality.model_copy(update={"suites": str(suites) if suites else None, "data_docs": docs})


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of the pipeline file, for editors."""
    schema = PipelineFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

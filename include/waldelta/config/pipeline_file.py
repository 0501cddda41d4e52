"""The pipeline file: what an engineer writes, validated once, with all problems listed.

The file is the stable surface; every other module takes the validated models below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from waldelta.config.airflow_connection import SPARK_CONNECTIONS
from waldelta.config.catalog import CatalogSettings
from waldelta.config.layout_options import LayoutOptions
from waldelta.config.parse_text import StrictModel, one_of, problems, read_yaml_file, refuse_if
from waldelta.config.quality import Quality
from waldelta.config.schedule import Schedule
from waldelta.config.source import Source, TableName, split_table_name
from waldelta.config.stores import STORE_VARIABLES, STORES, check_folder_uri
from waldelta.config.target_names import DEFAULT_TEMPLATE, TargetNames, check_template
from waldelta.config.type_options import TableTypeOptions, TypeOptions
from waldelta.error_catalog import ANY_ERROR, ERRORS
from waldelta.errors import ConfigError
from waldelta.target_modes.column_names import clashes
from waldelta.target_modes.modes import MODES, named_mode
from waldelta.target_modes.target_mode import Feature, TargetMode

SchemaPolicy = Literal["evolve", "ask", "fail", "ignore"]
RunnerName = Literal["auto", "spark"]
# It takes the place of the file's ``runner``.
RUNNER_VARIABLE = "WALDELTA_RUNNER"
VARIABLE_PREFIX = "WALDELTA_"
# Names other variables that the operator allows in pipeline files, separated by commas.
ALLOWED_VARIABLES = "WALDELTA_ALLOWED_VARIABLES"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """How a table's columns become its target's: whether changes are followed, and the types.

    Where the policy is to ask, ``answers`` are an operator's decisions on changes of this copy, by
    their keys, and ``may_copy`` is whether the operator agreed to a new one. ``renames`` are the
    columns that have another name in the target, by their source's name.
    """

    policy: SchemaPolicy
    types: TypeOptions
    answers: dict[str, str] = field(default_factory=dict)
    may_copy: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)


def _known_mode(name: Any) -> Any:
    # A literal type would be fixed at import, and so refuse a mode that is added later.
    refuse_if(name not in list(MODES), one_of(list(MODES), name))
    return name


ModeName = Annotated[
    str, PlainValidator(_known_mode), WithJsonSchema({"enum": list(MODES), "type": "string"})
]

_IDENTIFIER = re.compile(r"\A[a-z][a-z0-9_]*\Z")
# URLs drop or encode these characters, and Hadoop takes some for patterns: a lake could end up in
# two folders, or in another one.
_UNFIT_IN_ROOT = frozenset(" %#?\\|[]{}*^")
# The most that a slow server's statement timeout is raised to, unless the file sets more.
LONGEST_TIMEOUT_S = 3 * 3600


class TargetTable(LayoutOptions):
    """The source mapping of one target, its mode, types and layout."""

    source: TableName | None = Field(
        None,
        alias="from",
        description=("published table whose changes this target gets, if its name differs"),
    )
    name: str | None = Field(
        None,
        description=(
            "name of this target in the lake, instead of the one by target.names, which may use"
            " {schema} and {table}, too"
        ),
    )
    columns: dict[str, str] = Field(
        {}, description="columns with another name in the lake: their source's name, and that one"
    )
    partition_root: bool = Field(
        False,
        description="true: merge the published partitions of this table into one target",
    )
    mode: ModeName = Field(
        "mirror",
        description=", ".join(f"{mode} {mode.summary}" for mode in MODES.values()),
    )
    copied: bool = Field(
        True,
        alias="copy",
        description=("false: existing rows are not copied, as with PostgreSQL's option copy_data"),
    )
    schema_changes: SchemaPolicy | None = Field(None, description="overrides target.schema_changes")
    types: TableTypeOptions = Field(
        TableTypeOptions(), description="overrides the pipeline's types"
    )
    deletion_vectors: bool | None = Field(
        None,
        description="overrides target.deletion_vectors",
    )
    change_data_feed: bool | None = Field(
        None,
        description="overrides target.change_data_feed",
    )
    where: str | None = Field(
        None,
        min_length=1,
        description=("row filter of this target in PostgreSQL's SQL; Spark evaluates it"),
    )

    @field_validator("source")
    @classmethod
    def _check_qualified(cls, value: str | None) -> str | None:
        if value is not None:
            split_table_name(value)
        return value

    @field_validator("name")
    @classmethod
    def _name_template(cls, value: str | None) -> str | None:
        return None if value is None else check_template(value, needs_table=False)

    @field_validator("columns")
    @classmethod
    def _named_columns(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_if("" in value.values(), "a column needs a name: write one, or remove the entry")
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        mode = named_mode(self.mode)
        refuse_if(
            self.source is not None and self.partition_root,
            "from and partition_root exclude each other: with partition_root the target"
            " merges its own partitions",
        )
        refuse_if(
            self.partition_root and not mode.supports(Feature.PARTITION_ROOT),
            f"mode {self.mode} and partition_root exclude each other: publish the table via its"
            " root (publish_via_partition_root: true), and leave partition_root out",
        )
        refuse_if(
            not self.copied and not mode.supports(Feature.WITHOUT_COPY),
            f"mode {self.mode} and copy: false exclude each other: leave one of them out",
        )
        return self


# Settings of a table that the file doesn't name.
_DEFAULTS = TargetTable.model_validate({})


class Target(LayoutOptions):
    """The lake: where targets are, what they keep, and how they follow the source."""

    root: str = Field(
        description=(
            "URI of the lake's folder, such as file:///…"
            + "".join(f", {store.schemes[-1]}://…" for store in STORES.values())
            + "; ${WALDELTA_NAME} is replaced by the environment variable of that name"
        )
    )
    conn_id: str | None = Field(
        None,
        min_length=1,
        description=(
            "Airflow connection that opens the object store of root (types "
            + ", ".join(name for store in STORES.values() for name in store.connections.names)
            + f"); by default the environment ({STORE_VARIABLES})"
        ),
    )
    accept_unsafe_store: bool = Field(
        False,
        description=(
            "true: accept an s3a:// root although Spark may overwrite commits of other writers"
        ),
    )
    tables: dict[str, TargetTable] = Field({}, description="settings of single targets, by name")
    names: str = Field(
        DEFAULT_TEMPLATE,
        description=(
            "template of the targets' names in the lake, of {schema}, {table} and a dot between"
            " schema and table; without a dot the schema stays"
        ),
    )
    schema_changes: SchemaPolicy = Field(
        "evolve",
        description=(
            "changed source columns: evolve alters the target, or copies the table again if"
            " altering can't give its rows; ask does so, but waits for a decision before the target"
            " loses a column or is copied again; fail stops the table; ignore keeps the target's"
            " columns"
        ),
    )
    copy_within_run_mb: int = Field(
        64,
        ge=0,
        description=(
            "the CDC run itself copies a table up to this size again; larger ones are left to"
            " _initial_sync"
        ),
    )
    drift: Literal["repair", "report"] | None = Field(
        None,
        description=(
            "publication drift: repair corrects the target, report only warns; by default"
            " repair for publications that setup manages, else report"
        ),
    )
    metadata_columns: bool = Field(
        True,
        description=(
            "false: no columns _wd_lsn, _wd_commit_ts and _wd_raw; values that a type can't"
            " hold are lost"
        ),
    )
    types: TypeOptions = Field(
        TypeOptions(), description="types in the lake, where there is a choice"
    )
    deletion_vectors: bool = Field(
        False,
        description=("true: a commit marks changed rows instead of rewriting their files"),
    )
    change_data_feed: bool | None = Field(
        None,
        description=(
            "true: each commit shows the rows that it inserts, updates and deletes; false: none"
            " does; by default as the table's own properties say"
        ),
    )
    catalog: CatalogSettings | None = Field(
        None, description="catalog in which the targets are registered by name"
    )

    _written_root: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _store_written_root(cls, data: Any, validate: Callable[[Any], Self]) -> Self:
        target = validate(data)
        written = str(data["root"]) if isinstance(data, dict) else target.root
        target._written_root = written  # noqa: SLF001 - its own
        return target

    @property
    def written_root(self) -> str:
        """Returns the root as the file has it, with environment variables not replaced."""
        return self._written_root

    @field_validator("root")
    @classmethod
    def _uri(cls, value: str) -> str:
        value = _VARIABLE.sub(_value_of, value)
        check_folder_uri(value)
        unfit = sorted({c for c in value if c in _UNFIT_IN_ROOT or not c.isprintable()})
        refuse_if("://" not in value, f"root is a URI: write file://{Path(value).absolute()}")
        refuse_if(
            unfit,
            f"root contains {''.join(unfit)!r}, which Spark and delta-rs read differently:"
            " rename the folder",
        )
        return value.rstrip("/")

    @field_validator("names")
    @classmethod
    def _template(cls, value: str) -> str:
        return check_template(value, needs_table=True)

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        options = [self.types, *(table.types.over(self.types) for table in self.tables.values())]
        versioned = sorted(
            name
            for name in self.tables
            if not self.mode_of(name).supports(Feature.WITHOUT_METADATA)
        )
        refuse_if(
            not self.metadata_columns and any(types.need_raw for types in options),
            "types other than string need metadata_columns: true, since _wd_raw keeps the"
            " values that they can't hold",
        )
        refuse_if(
            not self.metadata_columns and versioned,
            "only mirrors do without metadata columns: set metadata_columns: true for"
            f" {', '.join(versioned)}",
        )
        for name, table in self.tables.items():
            if table.source is not None or table.partition_root or table.name is not None:
                split_table_name(name)
            for clash in clashes(table.columns.values(), metadata_columns=self.metadata_columns):
                refuse_if(clash, f"columns of {name}: {clash}")
        return self

    @property
    def target_names(self) -> TargetNames:
        """Returns the targets' names in the lake."""
        return TargetNames(
            self.names,
            {key: table.name for key, table in self.tables.items() if table.name is not None},
        )

    def types_of(self, table_name: str) -> TypeOptions:
        """Returns the type options of one table, named as PostgreSQL prints it."""
        return self.tables.get(table_name, _DEFAULTS).types.over(self.types)

    def deletion_vectors_of(self, table: str) -> bool:
        """Returns whether this table's commits write deletion vectors."""
        setting = self.tables.get(table, _DEFAULTS).deletion_vectors
        return self.deletion_vectors if setting is None else setting

    def change_data_feed_of(self, table: str) -> bool | None:
        """Returns whether this table's commits show their changes; None: as its properties say."""
        setting = self.tables.get(table, _DEFAULTS).change_data_feed
        return self.change_data_feed if setting is None else setting

    def layout_of(self, table: str) -> LayoutOptions:
        """Returns how this table's target is laid out."""
        return self.tables.get(table, _DEFAULTS).over(self)

    def mode_of(self, table: str) -> TargetMode:
        """Returns the mode of this table's target."""
        return named_mode(self.tables.get(table, _DEFAULTS).mode)

    def where_of(self, table: str) -> str | None:
        """Returns the filter of this table's target, as written."""
        return self.tables.get(table, _DEFAULTS).where

    def copies(self, table: str) -> bool:
        """Returns whether syncs copy this table's rows."""
        return self.tables.get(table, _DEFAULTS).copied

    def recopies(self, table: str) -> bool:
        """Returns whether runs copy this table again by themselves where only a copy is exact."""
        return self.policy_of(table) in ("evolve", "ask") and self.copies(table)

    def policy_of(self, table: str) -> SchemaPolicy:
        """Returns what to do when this table's columns change."""
        return self.tables.get(table, _DEFAULTS).schema_changes or self.schema_changes

    def schema_rules_of(self, table: str) -> SchemaRules:
        """Returns how this table's columns become those of its target."""
        return SchemaRules(
            self.policy_of(table), self.types_of(table), renames=self.columns_of(table)
        )

    def columns_of(self, table: str) -> Mapping[str, str]:
        """Returns the names in the lake of a target's columns, by the source's, where they
        differ.
        """
        names = self.tables.get(table, _DEFAULTS).columns
        return {source: name for source, name in names.items() if source != name}


class Batch(StrictModel):
    """Limits of one read window of the slot, and of its apply."""

    max_changes: int = Field(
        1_000_000, ge=1, description="changes that one read returns at most; ignored with streaming"
    )
    wal_window_mb: int = Field(
        512,
        ge=16,
        description="MB of WAL that one read decodes at most; bounds the server's temporary file",
    )
    statement_timeout_s: int = Field(
        600,
        ge=1,
        description="seconds for one read; after a timeout the run reads smaller windows",
    )
    apply_timeout_minutes: int = Field(
        60,
        ge=1,
        description="minutes after which Airflow ends the task apply",
    )

    @property
    def longest_timeout_s(self) -> int:
        """Returns the longest timeout of one call, once the timeout was raised."""
        return max(LONGEST_TIMEOUT_S, self.statement_timeout_s)


class Maintenance(StrictModel):
    """What the _maintenance DAG does when, and how long it keeps what is no longer needed."""

    schedule: Schedule | None = Field(
        "17 3 * * *", description="cron expression (UTC) of the DAG _maintenance; null: by hand"
    )
    keep_changes_days: int = Field(
        30, ge=1, description="days that the change log keeps applied changes"
    )
    keep_versions_hours: int = Field(
        168,
        ge=168,
        description=("hours that time travel and consistent cuts reach back; at least a week"),
    )

    @property
    def ledger_retention(self) -> timedelta:
        """Returns how far back the ledger's rows go."""
        return max(
            timedelta(days=self.keep_changes_days), timedelta(hours=self.keep_versions_hours)
        )


class SlotLimits(StrictModel):
    """When the slot's backlog is reported: by the WAL it keeps, and by the time until its limit."""

    warn_mb: int = Field(
        5_000, ge=1, description="warn when the server keeps more MB of WAL for the slot"
    )
    critical_mb: int = Field(
        50_000,
        ge=1,
        description="the same as a problem; also the advice for max_slot_wal_keep_size",
    )
    disk_budget_mb: int | None = Field(
        None,
        ge=1,
        description=("MB of WAL that the slot may use, if max_slot_wal_keep_size isn't set"),
    )
    warn_hours: float = Field(
        4,
        ge=0,
        description=(
            "warn when the slot would reach its limit within so many hours, at the current WAL rate"
        ),
    )
    critical_hours: float = Field(1, ge=0, description="the same as a problem")


class Notification(StrictModel):
    """A notifier for failures of some error classes."""

    # Not "on", which YAML reads as true.
    errors: tuple[str, ...] = Field(
        min_length=1,
        description=(
            "error classes, each with its subclasses, such as SlotError; any stands for every"
            " failure of a task"
        ),
    )
    notifier: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$",
        description="Airflow notifier class, with its module",
    )
    arguments: dict[str, Any] = Field(
        {}, description="arguments of the notifier; templates can use {{ failure.message }}"
    )

    @field_validator("errors")
    @classmethod
    def _check_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name != ANY_ERROR and name not in ERRORS:
                near = get_close_matches(name, [ANY_ERROR, *ERRORS], 1)
                hint = f"write {near[0]}" if near else "the documentation lists them, under Errors"
                raise ValueError(f"there is no class of errors {name!r}: {hint}")
        return value


class PipelineFile(StrictModel):
    """One pipeline: from a source's publications through one slot to one lake."""

    pipeline: str = Field(
        description=("prefix of the DAG ids; lower-case letters, digits and underscores")
    )
    source: Source = Field(description="PostgreSQL server, slot and publications")
    target: Target = Field(description="lake and targets")
    schedule: Schedule | None = Field(
        "*/5 * * * *", description="cron expression (UTC) of the DAG _cdc; null: triggered by hand"
    )
    owner: str = Field("data-engineering", description="owner of the DAGs in Airflow")
    tags: tuple[str, ...] = Field((), description="tags of the DAGs in Airflow")
    spark_conn_id: str = Field(
        "waldelta_spark",
        description=f"Airflow connection of type {' or '.join(SPARK_CONNECTIONS.names)}",
    )
    runner: RunnerName = Field(
        "auto",
        description=(
            "auto: Spark starts when there is more to do than one process does; spark: it does all"
        ),
    )
    batch: Batch = Field(Batch(), description="bounds of one read and of apply")
    quality: Quality = Field(Quality(), description="checks, reports and reconciliation")
    maintenance: Maintenance = Field(Maintenance(), description="schedule and retention")
    slot_limits: SlotLimits = Field(SlotLimits(), description="when to warn about the slot's WAL")
    row_values: Literal["read", "trigger", "edit"] = Field(
        "read",
        description=("permission on the DAG _cdc that shows values of rows on Airflow's pages"),
    )
    notify: tuple[Notification, ...] = Field(
        (), description="notifiers to call when a task fails, by class of error"
    )
    _folder: Path | None = PrivateAttr(None)

    @field_validator("pipeline")
    @classmethod
    def _name(cls, value: str) -> str:
        refuse_if(
            not _IDENTIFIER.match(value),
            "a pipeline's name has lower-case letters, digits and underscores, a letter first",
        )
        return value

    @property
    def folder(self) -> Path | None:
        """Returns the folder of the pipeline file; None for one that was made in memory."""
        return self._folder

    @property
    def pool(self) -> str:
        """Returns the Airflow pool in which this slot's runs are scheduled."""
        return f"waldelta_{self.source.slot}"

    @property
    def conn_ids(self) -> list[str]:
        """Returns the ids of the connections to the source, the store and the catalog, of which a
        job reads the environment variables.
        """
        catalog = self.target.catalog
        ids = (self.target.conn_id, None if catalog is None else catalog.conn_id)
        return [*self.source.conn_ids, *(conn_id for conn_id in ids if conn_id is not None)]


def load_pipeline_file(path: str | Path) -> PipelineFile:
    """Read and validate a pipeline file; raises ConfigError with every problem and its place.

    Folders in it are absolute afterwards.
    """
    path = Path(path)
    try:
        document = read_yaml_file(path)
    except OSError as err:
        raise ConfigError(
            f"pipeline file {path} can't be read ({err.strerror}): check the path"
        ) from err
    if not isinstance(document, dict):
        raise ConfigError(
            f"pipeline file {path} is empty or not a mapping: start with 'pipeline: <name>'"
        )
    try:
        pipeline = PipelineFile.model_validate(document)
    except ValidationError as err:
        lines = "\n".join(f"  - {problem}" for problem in problems(err, PipelineFile))
        raise ConfigError(f"pipeline file {path} is refused:\n{lines}") from err
    folder = path.absolute().parent
    placed = pipeline.model_copy(update={"quality": _with_absolute_folders(pipeline, folder)})
    placed._folder = folder  # noqa: SLF001 - the file itself doesn't contain it
    return placed


def _with_absolute_folders(pipeline: PipelineFile, folder: Path) -> Quality:
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


def _value_of(variable: re.Match[str]) -> str:
    """Returns the value of a ``${NAME}``.

    Raises ValueError for a variable that isn't set, or isn't allowed in pipeline files: Airflow's
    API server and DAG processor read these too, and their environment contains keys and passwords.
    """
    name = variable.group(1)
    allowed = {one.strip() for one in os.environ.get(ALLOWED_VARIABLES, "").split(",")}
    refuse_if(
        not name.startswith(VARIABLE_PREFIX) and name not in allowed,
        f"environment variable {name} isn't for pipeline files: use one whose name begins with"
        f" {VARIABLE_PREFIX}, or list {name} in {ALLOWED_VARIABLES} where Airflow and the jobs"
        " run",
    )
    refuse_if(
        not os.environ.get(name),
        f"environment variable {name} is not set: set it to the URI it stands for, or write the"
        " URI here",
    )
    return os.environ[name]

"""The pipeline on the scratch server: its runs after a statement, and what they say about it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from waldelta.config import PipelineFile
from waldelta.errors import (
    ConfigError,
    ConsentNeeded,
    JavaMissing,
    NeedsSync,
    PreflightFailed,
    SyncFailed,
    TargetDiffers,
    WaldeltaError,
)
from waldelta.jobs import Pipeline
from waldelta.lake.ledger import REMOVED, TableState
from waldelta.pipeline import RunResult, describe_error
from waldelta.pipeline.job import lake_of
from waldelta.pipeline.run_result import RunFailed, TargetFindings
from waldelta.postgres import TableId
from waldelta.quantities import counted, duration, size
from waldelta.rehearsal.production import Production
from waldelta.rehearsal.report import Impact
from waldelta.rehearsal.scratch_server import ScratchDatabase
from waldelta.spark import Runner
from waldelta.stages.setup.setup import SetupPlan

_CONN_ID = "waldelta_rehearsal"
# Errors of a target after which a copy is all that it needs.
_COPIES = (NeedsSync.__name__, SyncFailed.__name__)
_AGAIN = 3
_NOT_COMPARED = "target and source can't be compared"
_SYNC = "sync the table again right after the migration"
_SECURED = (
    "row-level security is on: changes still arrive, but copies and comparisons fail for a role"
    " from which a policy hides rows"
)
_REFUSE = "set schema_changes: ask and refuse: the column keeps its last values"
_OTHER_NAME = "give the new one another name, and drop the old one once no reader needs it"
_BYPASS = "let a superuser run alter role … bypassrls for the role of the pipeline's connection"


@dataclass(frozen=True, slots=True)
class _Shape:
    """A target's columns with their types, and the oid of its source.

    ``numbers`` has the source's attribute numbers, by which a column is the same after a change.
    """

    source: int
    types: Mapping[str, str]
    numbers: Mapping[str, int]

    def name_of(self, number: int, name: str) -> str:
        """Returns the name of a former column now, empty where the source has it no more."""
        names = {number: name for name, number in self.numbers.items()}
        return names.get(number, "") if number and names else name


@dataclass(slots=True)
class RehearsedPipeline:
    """The pipeline with the scratch database as its source, and a lake of its own.

    A standby and failover are left out, since there is one server, and so is a catalog.
    """

    file: PipelineFile
    scratch: ScratchDatabase
    production: Production
    pipeline: Pipeline = field(init=False)
    shapes: dict[str, _Shape] = field(init=False, default_factory=dict)
    # What was found before, and has been so since.
    warned: set[str] = field(init=False, default_factory=set)
    stopped: set[Impact] = field(init=False, default_factory=set)
    # How far row-level security went by oid before the migration, and the tables where it goes
    # further now.
    security: dict[int, int] = field(init=False, default_factory=dict)
    secured: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Put the connection where the pipeline's jobs look for it."""
        names = {"dbname": "schema", "user": "login"}
        connection = {
            names.get(name, name): value
            for name, value in conninfo_to_dict(self.scratch.conninfo).items()
        }
        os.environ[f"AIRFLOW_CONN_{_CONN_ID.upper()}"] = json.dumps(
            {"conn_type": "postgres", **connection}
        )
        self.change(self.file)

    def change(self, file: PipelineFile) -> None:
        """Go on with another pipeline file."""
        source = {"conn_id": _CONN_ID, "read_from": None, "failover": False}
        # A catalog would get entries of a lake that is gone afterwards.
        target = {"root": self.scratch.lake.as_uri(), "conn_id": None, "catalog": None}
        self.file = file.model_copy(
            update={
                "source": file.source.model_copy(update=source),
                "target": file.target.model_copy(update=target),
            }
        )
        self.pipeline = Pipeline(self.file, lake_of(self.file))

    def follow(self, file: PipelineFile) -> SetupPlan:
        """Go on with another pipeline file; returns what setup did, or its plan with problems."""
        self.change(file)
        plan = self.pipeline.check(estimate=False)
        return plan if plan.problems else self.pipeline.setup()

    def begin(self, runner: Runner) -> None:
        """Set up, and copy all tables; raises ConfigError where that fails."""
        try:
            self.pipeline.setup()
        except PreflightFailed as err:
            raise ConfigError(
                f"the pipeline can't be set up on {self.production.source}"
                f" ({'; '.join(err.problems)}): correct it, or pass the pipeline file as it is"
                " before the migration, and the new one with --pipeline-change"
            ) from None
        try:
            self.pipeline.sync(runner)
            self.pipeline.consume(runner)
        except RunFailed as failed:
            error = failed.result.error or {}
            raise ConfigError(
                f"the pipeline fails without the migration: {error.get('message', failed)}"
            ) from None
        self.shapes = self._shapes()
        self.warned = set(self._preflight())
        self.security = {oid: level for oid, _, level in self._security()}

    def judge(self, runner: Runner, touched: Set[str] | None) -> Iterator[Impact]:
        """Run what schedules run, until everything is copied, and yield what they found.

        A question on a source change is agreed to, so that the next statement can be judged.
        Targets of the ``touched`` tables are compared with the source, all targets for None.
        """
        yield from self._new_row_security()
        said: set[tuple[str, str]] = set()
        stopped: set[Impact] = set()
        warnings: list[str] = []
        for _ in range(_AGAIN):
            result, error = self._consume(runner)
            impacts = [] if result is None else list(self._of_result(result))
            warnings += [] if result is None else result.warnings
            if error is not None and error["class"] == JavaMissing.__name__:
                raise JavaMissing(error["message"])
            if error is not None and (result is None or not result.targets.table_errors):
                impacts.append(Impact("stop", "", f"{error['class']}: {error['message']}"))
            questions = list(self._agree(runner))
            stopped = {one for one in impacts if one.kind == "stop"}
            for one in (*impacts, *questions):
                if one not in self.stopped and (key := (one.kind, one.table)) not in said:
                    said.add(key)
                    yield one
            if not any(one.kind in ("copy", "wait") for one in (*impacts, *questions)):
                break
            copies = self._copy(runner)
        else:
            for one in copies:
                if one not in self.stopped:
                    yield one
            stopped.update(copies)
        self.stopped = stopped
        yield from self._compare(runner, touched, warnings)
        yield from self._readers()
        yield from self._warnings()

    def _new_row_security(self) -> Iterator[Impact]:
        """Yields the tables whose row-level security was switched on.

        The scratch server's role reads all rows, as production's pipeline perhaps does not.
        """
        if self.production.reads_hidden_rows:
            return
        further = {
            table for oid, table, level in self._security() if level > self.security.get(oid, 0)
        }
        for table in sorted(further - self.secured):
            yield Impact("note", table, _SECURED, _BYPASS)
        self.secured = further

    def _security(self) -> list[tuple[int, str, int]]:
        with self.scratch.connect() as connection:
            rows = connection.execute(_SECURITY).fetchall()
        return [(oid, str(TableId(schema, name)), level) for oid, schema, name, level in rows]

    def _consume(self, runner: Runner) -> tuple[RunResult | None, Mapping[str, Any] | None]:
        try:
            return self.pipeline.consume(runner), None
        except RunFailed as failed:
            return failed.result, failed.result.error
        except JavaMissing:
            raise
        except WaldeltaError as err:
            return None, describe_error(err)

    def _of_result(self, result: RunResult) -> Iterator[Impact]:
        targets = result.targets
        copied = [name for name, table in result.tables.items() if table.rows is not None]
        yield from (
            self._copy_impact(name, "it is a new table")
            for name in (*targets.never_copied, *targets.new_tables)
        )
        yield from (self._copy_impact(name, "the run copies it again by itself") for name in copied)
        yield from self._stops(targets, copied)

    def _stops(self, targets: TargetFindings, copied: Collection[str]) -> Iterator[Impact]:
        for name in targets.unpublished:
            yield Impact("stop", name, "it isn't published any more: its target gets no changes")
        for name, error in targets.table_errors.items():
            if error["class"] == JavaMissing.__name__:
                raise JavaMissing(error["message"])
            if error["class"] == ConsentNeeded.__name__ or name in copied:
                continue
            if error["class"] in _COPIES or name in targets.needs_sync:
                yield self._copy_impact(name, error["message"])
            else:
                text = error["message"].removeprefix(f"{name}: ")
                yield Impact("stop", name, f"{error['class']}: {text}")
        for name in targets.needs_sync:
            if name not in targets.table_errors:
                yield self._copy_impact(name, "it must be copied again")

    def _copy_impact(self, name: str, reason: str) -> Impact:
        why = reason.removeprefix(f"{name}: ")
        way = ""
        if name in self.secured:
            why, way = f"{why}; it fails for a role from which a policy hides rows", _BYPASS
        at = self.production.sizes.get(name)
        if at is None:
            return Impact("copy", name, f"all rows are read again: {why}", way)
        seconds, speed = self.production.copy_time(name)
        wal = self.production.wal_bytes_per_hour
        retention = (
            ""
            if wal is None
            else f", while the slot keeps {size(int(wal * seconds / 3600))} of WAL"
        )
        return Impact(
            "copy",
            name,
            f"{counted(at.rows, 'row')} ({size(at.bytes)}) are read again, about"
            f" {duration(seconds)} {speed}{retention}: {why}",
            way,
        )

    def _agree(self, runner: Runner) -> Iterator[Impact]:
        tables = set()
        for one in self.pipeline.waiting():
            text = one.get("reason") or one.get("why") or ""
            yield Impact("wait", str(one["table"]), str(text))
            if "agree" in one.get("actions", ()):
                tables.add(str(one["table"]))
        if tables:
            with suppress(RunFailed, WaldeltaError):  # The next run says what is left.
                self.pipeline.decide(runner, "agree", tables=sorted(tables), reason="rehearsal")

    def _copy(self, runner: Runner, tables: Sequence[str] | None = None) -> list[Impact]:
        """Copy what needs it, or these tables; returns the copies that fail."""
        try:
            self.pipeline.sync(runner, tables, reason="rehearsal")
        except RunFailed as failed:
            errors = failed.result.targets.table_errors or {"": failed.result.error or {}}
        except WaldeltaError as err:
            errors = {"": describe_error(err)}
        else:
            return []
        return [
            Impact("stop", name, f"its copy fails: {error['class']}: {error['message']}")
            for name, error in errors.items()
        ]

    def _compare(
        self, runner: Runner, touched: Set[str] | None, warnings: Sequence[str]
    ) -> Iterator[Impact]:
        """Yields which targets differ, and copies them again, to judge later statements.

        Of ``warnings``, one that a run gave for the table says why.
        """
        tables = None if touched is None else sorted(self._states().keys() & touched)
        if tables == []:
            return
        try:
            self.pipeline.reconcile(runner, tables)
        except RunFailed as failed:
            differing = {
                name: table.differing
                for name, table in failed.result.tables.items()
                if table.differing
            }
            # What stops has been said.
            stopped = {one.table for one in self.stopped}
            for name, error in failed.result.targets.table_errors.items():
                if name not in stopped:
                    yield Impact("note", name, f"{_NOT_COMPARED}: {error['message']}")
            if not differing:
                return
            for name, number in differing.items():
                warning = next((text for text in warnings if text.startswith(f"{name}:")), None)
                why = "no run notices it" if warning is None else warning.removeprefix(f"{name}: ")
                differ = f"{counted(number, 'row')} {'differs' if number == 1 else 'differ'}"
                yield Impact("data-loss", name, f"{differ} from the source: {why}", _SYNC)
            self._copy(runner, sorted(differing))
        except TargetDiffers as err:
            yield Impact("data-loss", "", str(err))
        except WaldeltaError as err:
            if not self.stopped:
                yield Impact("note", "", f"{_NOT_COMPARED}: {err}")

    def _readers(self) -> Iterator[Impact]:
        former, self.shapes = self.shapes, self._shapes()
        for name in sorted(former.keys() | self.shapes.keys()):
            old, new = former.get(name), self.shapes.get(name)
            if old is None:
                yield Impact("readers", name, "it is a new target")
            elif new is None:
                yield Impact("readers", name, "its target gets no changes any more")
            elif old.source == new.source:
                yield from _changes(name, old, new)
            else:
                yield from self._other_table(name, old)
                yield from _changes(name, replace(old, numbers={}), replace(new, numbers={}))

    def _other_table(self, name: str, old: _Shape) -> Iterator[Impact]:
        with self.scratch.connect() as connection:
            row = connection.execute(_TABLE, [old.source]).fetchone()
        if row is None:
            text = "the lake loses its rows: the table was dropped, and another one has its name"
            yield Impact("data-loss", name, text, _OTHER_NAME)
        else:
            text = f"its rows are another table's, the former one is {TableId(*row)} now"
            yield Impact("readers", name, text)

    def _warnings(self) -> Iterator[Impact]:
        """Yields what preflight finds since the statement, with its remedies."""
        texts = self._preflight()
        for key in sorted(texts.keys() - self.warned):
            yield Impact("note", "", f"setup's checks on the scratch server: {texts[key]}")
        self.warned |= texts.keys()

    def _preflight(self) -> dict[str, str]:
        """Returns what setup would say, by its text without figures."""
        try:
            texts = [finding.text for finding in self.pipeline.check(estimate=False).findings]
        except WaldeltaError as err:
            texts = [str(err)]
        return {_without_figures(text): text for text in texts}

    def _shapes(self) -> dict[str, _Shape]:
        lake, shapes = self.pipeline.job().lake, {}
        for name, state in self._states().items():
            if (table := lake.target(name).find()) is not None:
                numbers = {column.name: column.attnum for column in state.columns}
                source = state.root_id or next(iter(state.relation_ids), 0)
                shapes[name] = _Shape(source, table.spark_types, numbers)
        return shapes

    def _states(self) -> dict[str, TableState]:
        states = self.pipeline.job().read_states().items()
        return {name: state for name, state in states if state.status != REMOVED}


def _changes(name: str, old: _Shape, new: _Shape) -> Iterator[Impact]:
    """Yields what readers of a target see, and which values it loses."""
    after = {column: new.name_of(old.numbers.get(column, 0), column) for column in old.types}
    names = {column: new_name for column, new_name in after.items() if new_name in new.types}
    losses = [column for column in old.types if column not in names]
    parts = {
        "added": [c for c in new.types if c not in names.values() and c not in losses],
        "gone": [c for c in losses if c not in new.types],
        "replaced": [c for c in losses if c in new.types],
        "renamed": [f"{c} → {new_name}" for c, new_name in names.items() if c != new_name],
        "retyped": [
            f"{new_name} {old.types[c]} → {new.types[new_name]}"
            for c, new_name in {**dict(zip(losses, losses, strict=True)), **names}.items()
            if new_name in new.types and old.types[c] != new.types[new_name]
        ],
    }
    if text := "; ".join(f"{what}: {', '.join(which)}" for what, which in parts.items() if which):
        yield Impact("readers", name, text)
    if losses:
        way = _OTHER_NAME if parts["replaced"] else _REFUSE
        yield Impact("data-loss", name, f"the lake loses the values of {', '.join(losses)}", way)


def _without_figures(text: str) -> str:
    """Returns a text without its numbers, which grow with the slot; those of names stay.

    >>> _without_figures("the slot keeps 24 MB; public.orders_2 has no key")
    'the slot keeps  MB; public.orders_2 has no key'
    """
    return re.sub(r"\b\d+\b", "", text)


_TABLE = """
select n.nspname, c.relname
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %s
"""
_SECURITY = """
select c.oid::int8, n.nspname, c.relname, relrowsecurity::int + relforcerowsecurity::int
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.relrowsecurity
"""

"""The lakes of the story, written by the ledger's own writers as runs leave them."""

import json
import random
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from math import sin, tau

from tests.pictures.story import AT, NOTEBOOK, SINCE, TAMPERED, Tale, Trouble, today
from tests.support.bookkeeping import add_reports
from waldelta.config import PipelineFile
from waldelta.errors import SlotLost
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    BatchCut,
    ColumnState,
    Decision,
    Decisions,
    ExpectationResult,
    ExternalCommit,
    Gap,
    Ledger,
    Reconciliation,
    RowDifference,
    Run,
    SlotReading,
    StorageState,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import ColumnDifference, Reconciliations
from waldelta.lake.ledger.records import AttributeState
from waldelta.lsn import Lsn
from waldelta.pipeline import RunResult, StageResult, describe_error
from waldelta.pipeline.run_result import ReportedLag
from waldelta.quantities import size
from waldelta.stages.check.reports.entries import ReportEntry

_MEANINGS = (
    "key (id) is unique", "key column id has no nulls", "NOT NULL column created_at has no nulls",
    "status has labels of its enum only", "created_at isn't in the future",
)  # fmt: skip
_LABELS = 3
_COLUMNS = [
    ColumnState(name, 0, -1, type_name, spark_type, not_null, number)
    for number, (name, type_name, spark_type, not_null) in enumerate(
        (
            ("id", "bigint", "bigint", True),
            ("status", "order_status", "string", True),
            ("amount", "numeric(12,2)", "decimal(12,2)", False),
            ("created_at", "timestamp with time zone", "timestamp", True),
        ),
        start=1,
    )
]
_COMMENTS = {"status": "where it is on its way", "amount": "in the order's currency, with tax"}
_STORAGE = StorageState(
    attributes=[
        *(
            AttributeState(c.attnum, 1, name=c.name, comment=_COMMENTS.get(c.name))
            for c in _COLUMNS
        ),
        AttributeState(5, 1, name="card_number"),
    ]
)
_COPIED = SINCE - timedelta(days=40)
_KEEP_SIZE = 10 << 30
# From a run's begin until it asks the source.
_BEFORE = timedelta(seconds=3)
_PAID = [
    ColumnDifference("status", "paid", "open"),
    ColumnDifference("paid_at", "2026-11-22 15:07:31.48+00", None),
]
_DIFFERENCES = [
    RowDifference("different", '{"id": "407733"}', 1, _PAID),
    RowDifference("missing", '{"id": "398110"}'),
]
# The target has none of these: payments' gate set them aside.
_REFUSED = [("881204", "-12.50"), ("881377", "-80.00"), ("881391", "-4.99")]
_REFUSED_AT = today(9, 20)


def run_id(at: datetime) -> str:
    """As Airflow names scheduled runs."""
    return f"scheduled__{at.isoformat()}"


@dataclass
class _Lake:
    """A lake as it grows run by run; ``rows`` and ``versions`` are the tables'."""

    tale: Tale
    chance: random.Random
    lsn: int
    landed: int
    batch: int = 11_520
    rows: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    batches: dict[str, BatchCut] = field(default_factory=dict)
    results: list[ExpectationResult] = field(default_factory=list)
    found: list[Reconciliation] = field(default_factory=list)

    def live(self) -> None:
        """From its first run to the last; once a night it is compared with its source."""
        for at in self.tale.runs():
            if (
                at.date() > SINCE.date()
                and at.time() == today(2, 30).time()
                and self.tale.compared is not None
            ):
                self._compare(at)
            if TAMPERED in self.tale.tables and timedelta() < at - NOTEBOOK <= self.tale.step:
                self.versions[TAMPERED] += 2
            self._run(at)

    def _run(self, at: datetime) -> None:
        trouble, result = self.tale.trouble(at), RunResult("consume", run_id(at))
        changed = {} if trouble and trouble.stage == "land" else self._change(at, trouble)
        # Others than the published tables write WAL too.
        changes = round(
            sum(cut.inserted + cut.updated + cut.deleted for cut in changed.values()) * 1.06
        )
        self.lsn += 210 * changes + self.chance.randrange(30_000, 240_000)
        seconds = {
            "land": 1.6 + changes / 2600 + self.chance.random(),
            "apply": 2.9 + 0.55 * len(changed) + changes / 3000,
            "check": 1.8 + 0.4 * len(changed) + self.chance.random(),
            "report": 0.2 + self.chance.random() / 5,
        }
        start, ended = self.landed, at + _BEFORE
        for name, took in seconds.items():
            failed = trouble is not None and trouble.stage == name
            result.stages[name] = StageResult("failed" if failed else "succeeded", round(took, 3))
            ended += timedelta(seconds=took)
            if failed:
                result.stages[name].error = result.error = describe_error(trouble.error)
                result.error["message"] = self._told(trouble)
                if name == "land":
                    break
        result.status = "succeeded" if trouble is None else "failed"
        if "apply" in result.stages:
            self._land(result, changes, at)
            self._apply(result, list(changed.values()), at, trouble)
        before, after = result.landed.slot_before, result.reported.slot_after
        run = Run(
            ended, result.run_id, "consume", result.status, "scheduled", at - self.tale.step, at,
            changes=changes, seconds=sum(seconds[name] for name in result.stages),
            result=result.to_json(), targets=list(result.attempt.done.values()),
            **{
                f"{name}_seconds": stage.seconds
                for name, stage in result.stages.items()
                if name != "report"
            },
        )  # fmt: skip
        if after is not None:
            run = replace(
                run, start_lsn=start, end_lsn=self.landed, as_of=at + _BEFORE,
                lag_before_bytes=before.lag_bytes, lag_bytes=after.lag_bytes,
                retained_bytes=after.retained_bytes, wal_status=after.wal_status,
                applied=not result.targets.not_applied,
            )  # fmt: skip
        self.runs.append(run)

    def _told(self, trouble: Trouble) -> str:
        return str(trouble.error).replace("<landed>", str(Lsn(self.landed)))

    def _change(self, at: datetime, trouble: Trouble | None) -> dict[str, TargetCut]:
        """What a run does to a table: more by day than by night, and what is left over."""
        found = {}
        missed = (self.lsn - self.landed) // 250_000 + 1
        day = 0.55 - 0.45 * sin(tau * (at.hour * 60 + at.minute + 120) / 1440)
        for name, rows in self.tale.tables.items():
            checks = [t for t in self.tale.troubles if t.stage == "check" and name in t.tables]
            rests = any(t.last < at for t in checks)
            share = self.chance.uniform(0.6, 1.4) * self.tale.every / 15
            count = round(rows * day * missed * share)
            if any(t is trouble for t in checks):
                count = 7
            if trouble and trouble.stage == "apply" and name in trouble.tables:
                continue
            if rests or count < 3 or (rows < 400 and self.chance.random() < 0.4 and not checks):
                continue
            inserted, deleted = round(count * 0.46), count // 18
            self.rows[name] += inserted - deleted
            self.versions[name] += 1
            completed = self.chance.randrange(4) if rows > 500 and self.chance.random() < 0.1 else 0
            is_refused = self.tale.is_gated and (name, at) == ("public.payments", _REFUSED_AT)
            found[name] = TargetCut(
                name, 1, self.versions[name], inserted, count - inserted - deleted, deleted,
                completed=completed, quarantined=len(_REFUSED) if is_refused else 0,
            )  # fmt: skip
        return found

    def _land(self, result: RunResult, changes: int, at: datetime) -> None:
        wal, left, held = self.lsn - self.landed, self.chance.randrange(300, 2400), self.tale.held
        result.landed.start_lsn, result.landed.end_lsn = str(Lsn(self.landed)), str(Lsn(self.lsn))
        result.landed.changes = changes
        result.landed.slot_before = SlotReading(
            at.isoformat(), "reserved", wal - left, held + wal, _KEEP_SIZE - held - wal
        )
        slot = SlotReading(at.isoformat(), "reserved", left, held, _KEEP_SIZE - held)
        result.reported = ReportedLag(left, slot)
        took, load = result.stages["land"].seconds, result.source
        load.slot_calls, load.wal_read_bytes, load.decoded_bytes = 2, 2 * wal, round(wal * 0.8)
        load.slot_seconds, load.server_seconds = took * 0.8, took * 0.5
        told = f"{changes:,} changes in 1 batch, landed in {took * 0.7:.1f} s, consumed in 0.1 s"
        result.stages["land"].detail = told
        result.stages["report"].detail = f"lag {size(left)}"
        self.landed, self.batch = self.lsn, self.batch + 1

    def _apply(
        self, result: RunResult, cuts: list[TargetCut], at: datetime, trouble: Trouble | None
    ) -> None:
        ended, commit_ts = at + self._after(result, "land", "apply"), at + timedelta(seconds=2)
        cut = BatchCut(ended, result.run_id, self.batch, self.lsn, commit_ts, cuts)
        self.batches[result.run_id] = cut
        result.add_cut(cut)
        result.stages["apply"].detail = f"1 apply batch, {len(cuts)} tables changed"
        if trouble and trouble.stage == "apply":
            result.targets.not_applied = list(trouble.tables)
        unmet = trouble.tables if trouble and trouble.stage == "check" else ()
        warnings, checked = 0, at + self._after(result, "land", "apply", "check")
        for one in cuts:
            warned, unknown = (
                at in told.get(one.table_name, ()) for told in (self.tale.warned, self.tale.unknown)
            )
            warnings += warned
            if at < AT - timedelta(days=1):
                continue
            for n, meaning in enumerate(_MEANINGS):
                last = n == len(_MEANINGS) - 1
                missed = warned if last else n == _LABELS and one.table_name in unmet
                success = None if last and unknown else not missed
                severity = "warning" if last else "critical"
                self.results.append(ExpectationResult(
                    checked, result.run_id, one.table_name, f"expectation_{n}", meaning, severity,
                    "catalog", success, None, 0 if success else 2, one.version,
                ))  # fmt: skip
        of = f"{len(_MEANINGS) * len(cuts)} expectations on {len(cuts)} tables"
        told = f"{of}, {len(unmet)} critical and {warnings} warnings not met"
        result.stages["check"].detail = told

    @staticmethod
    def _after(result: RunResult, *stages: str) -> timedelta:
        return _BEFORE + timedelta(seconds=sum(result.stages[name].seconds for name in stages))

    def _compare(self, at: datetime) -> None:
        if at > self.tale.compared:
            return
        began = at
        for name in self.tale.tables:
            if name in self.tale.uncompared:
                continue
            rows, seconds = self.rows[name], 1.1 + self.rows[name] / 420_000 + self.chance.random()
            began += timedelta(seconds=seconds)
            found = Reconciliation(
                began, run_id(at), table_name=name, generation=1, position=self.landed,
                batch=self.batch, version=self.versions[name], status="equal", buckets=64,
                in_flight=self.chance.randrange(3) if self.tale.tables[name] > 500 else 0,
                seconds=seconds, source_rows=rows, target_rows=rows,
            )  # fmt: skip
            if name == TAMPERED and at > NOTEBOOK:
                found = replace(
                    found, status="different", target_rows=rows - 1, different=1, missing=1,
                    differing_buckets=2, differences=_DIFFERENCES,
                )  # fmt: skip
            self.found.append(found)


def write_lake(pipeline: PipelineFile, tale: Tale) -> None:
    """All that the pages read of it."""
    root, first = pipeline.target.root, tale.lsn
    names = list(tale.tables)
    rows = {name: 900 * many + 41 * len(name) for name, many in tale.tables.items()}
    versions = dict.fromkeys(names, 9_000)
    lake = _Lake(tale, random.Random(tale.name), first, first, rows=dict(rows), versions=versions)
    lake.live()
    ledger = Ledger(Lake(root))
    copied = partial(TableState, _COPIED, "manual__sync", generation=1, status="synced")
    described = {
        "columns": _COLUMNS,
        "key_columns": ["id"],
        "storage": _STORAGE,
        "unpublished": [5],
        "publishes": ["insert", "update", "delete", "truncate"],
    }
    ledger.append_all([copied(table_name=name, rows=rows[name], **described) for name in names])
    ledger.append_all(lake.runs)
    ledger.append_all(lake.results)
    Reconciliations(Lake(root)).add(lake.found)
    if tale.is_gated:
        _set_aside(pipeline, lake)
    if TAMPERED in tale.tables:
        commits = [
            ExternalCommit(9_000 + n, what, "notebook", NOTEBOOK)
            for n, what in ((1, "UPDATE"), (2, "DELETE"))
        ]
        state = ledger.table_states()[TAMPERED]
        ledger.append(replace(state, at=NOTEBOOK, external_commits=commits))
    _list_reports(pipeline, lake)
    for trouble in tale.troubles:
        if isinstance(trouble.error, SlotLost):
            _lose(tale, ledger, lake, trouble)


def _lose(tale: Tale, ledger: Ledger, lake: _Lake, trouble: Trouble) -> None:
    remedy = "run resync: it recreates the slot and repairs the targets"
    ledger.append(Gap(
        trouble.first, run_id(trouble.first), "open", f"{tale.name}_cdc", "1", 1, "0/1",
        lake.landed, lake.landed + _KEEP_SIZE, type(trouble.error).__name__, lake._told(trouble),
        remedy,
    ))  # fmt: skip


def _set_aside(pipeline: PipelineFile, lake: _Lake) -> None:
    told = next(run for run in lake.runs if run.run_id == run_id(_REFUSED_AT))
    sent = [
        {"id": key, "order_id": f"7{key[1:]}", "amount": amount, "currency": "EUR"}
        for key, amount in _REFUSED
    ]
    batch = lake.batches[told.run_id].batch
    Decisions(Lake(pipeline.target.root)).add([
        Decision(
            told.at, told.run_id, "waiting", "public.payments", 1, batch,
            json.dumps({"id": one["id"]}), [], json.dumps(one), told.end_lsn, told.at,
            reason="fails amount isn't negative",
        )
        for one in sent
    ])  # fmt: skip


def _list_reports(pipeline: PipelineFile, lake: _Lake) -> None:
    last, met = list(lake.batches.values())[-1], len(_MEANINGS)
    run = (last.at, pipeline.pipeline, last.run_id)
    entries = [
        ReportEntry(*run, one.table_name, one.version, met, (), (), "page") for one in last.targets
    ]
    if entries:
        add_reports(pipeline, *entries)

"""Pipelines for integration tests, with publication and slot on a test's database."""

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, SlotMove, now
from waldelta.pipeline import Job, SourceConnections
from waldelta.pipeline.job import load_job
from waldelta.postgres.server_position import read_position
from waldelta.slot.acknowledge import confirmed_lsn


def pipeline_file(
    lake: str, slot: str, tables: list[str] | None = None, options: dict | None = None, **overrides
) -> PipelineFile:
    """A pipeline; ``options`` are the source's, ``overrides`` replace top-level keys."""
    entries = [{"name": t} if isinstance(t, str) else t for t in tables or ["public.t"]]
    publication = {"name": f"{slot}_pub", "tables": entries}
    document = {
        "pipeline": slot,
        "source": {"conn_id": "test_source", "slot": slot, "publications": [publication],
                   "options": options or {}},
        "target": {"root": lake},
        "quality": {"enabled": False},
    }  # fmt: skip
    return PipelineFile.model_validate(document | overrides)


def whole_database(
    lake: str = "file:///nowhere", source: dict | None = None, **overrides
) -> PipelineFile:
    """A pipeline of all tables, for tests that reach no database."""
    publications = [{"name": "p", "all_tables": True}]
    own = {"conn_id": "c", "slot": "s", "publications": publications}
    document = {"pipeline": "shop", "source": own | (source or {}), "target": {"root": lake}}
    return PipelineFile.model_validate(document | overrides)


def written(pipeline: PipelineFile, folder: Path, name: str = "pipeline.yml") -> Path:
    """The pipeline's file, in this folder."""
    document = pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True)
    path = folder / name
    path.write_text(yaml.safe_dump(document))
    return path


def job_of(
    pipeline: PipelineFile,
    conninfo: str = "",
    run_id: str = "run",
    read_conninfo: str | None = None,
) -> Job:
    """A run whose connections aren't in the environment; without them it only reads the lake."""
    return Job(pipeline, SourceConnections(pipeline.source, conninfo, read_conninfo), run_id)


def job_for(server: Any, lake: str, *publications: dict, name: str = "flights", **source) -> Job:
    """A run of these publications on a database, by a slot that is new unless named."""
    slot = source.pop("slot", None) or f"s_{uuid.uuid4().hex[:10]}"
    own = {"conn_id": "test_source", "slot": slot, "publications": list(publications), **source}
    document = {"pipeline": name, "source": own, "target": {"root": lake}}
    conninfo = server if isinstance(server, str) else server.conninfo
    return job_of(PipelineFile.model_validate(document), conninfo, "run_1")


def source_state(database) -> tuple:
    """Everything that setup could change."""
    slots = "select slot_name, active from pg_replication_slots where database = %s"
    return (
        *(
            database.execute(f"select to_jsonb(r) from pg_publication{what} r order by 1")
            for what in ("", "_rel", "_namespace")
        ),
        database.execute(slots, (database.name,)),
    )


def slot_events(lake: str) -> list[str]:
    """What the ledger says happened to the slot, oldest first."""
    return [move.event for move in Ledger(Lake(lake)).slot_moves()]


def bare_slot(database, pipeline: PipelineFile) -> Job:
    """Make publication and slot by hand, without setup, and enter the slot into the ledger."""
    job = load_job(pipeline, "test")
    source = pipeline.source
    tables = ", ".join(entry.name for entry in source.publications[0].tables)
    database.execute(f"create publication {source.publications[0].name} for table {tables}")
    database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)",
        (source.slot, source.options.two_phase),
    )
    position, lsn = (
        read_position(database.connection),
        confirmed_lsn(database.connection, source.slot),
    )
    job.ledger.append(
        SlotMove(
            now(), "test", "created", source.slot, position.system_identifier, position.timeline,
            str(lsn), lsn.value,
        )
    )  # fmt: skip
    return job


def bare_job(
    database, lake: str, tables: list[str] | None = None, options: dict | None = None, **overrides
) -> Job:
    """The same of a pipeline of these tables whose slot has the database's name."""
    slot = f"s_{database.name}"
    return bare_slot(database, pipeline_file(lake, slot, tables, options, **overrides))


def pipeline_on(database, lake: str, *publications: dict, **overrides) -> Pipeline:
    """A pipeline of these publications whose slot has the database's name; nothing is set up."""
    slot = f"s_{database.name}"
    source = {"conn_id": "test_source", "slot": slot, "publications": list(publications)}
    document = {"pipeline": slot, "source": source, "target": {"root": lake}}
    document |= {"quality": {"enabled": False}}
    return Pipeline(PipelineFile.model_validate(document | overrides))


def new_pipeline(
    database, lake: str, tables: list[str] | None = None, options: dict | None = None, **overrides
) -> Pipeline:
    """A pipeline of these tables whose slot has the database's name; nothing is set up."""
    return Pipeline(pipeline_file(lake, f"s_{database.name}", tables, options, **overrides))


def copied_pipeline(runner, pipeline: Pipeline) -> Pipeline:
    """Set a pipeline up, copy its tables, and return it."""
    pipeline.setup()
    pipeline.sync(runner)
    return pipeline


def beside_superuser(warnings: Iterable[str]) -> list[str]:
    """The warnings but the one about the tests' own role, which is there once."""
    warnings = list(warnings)
    others = [text for text in warnings if "is a superuser" not in text]
    assert len(warnings) - len(others) == 1, warnings
    return others

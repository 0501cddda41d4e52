"""The DAGs' documentation in Airflow's UI (``doc_md``): purpose, params, what to do on failure."""

from __future__ import annotations

from collections.abc import Iterator

from waldelta.config import PipelineFile, Publication
from waldelta.control_characters import visible

_KINDS = {
    "setup": """\
Checks the source, then creates or alters publications and the slot. It refuses anything that would
break the source before it changes anything. A second run changes nothing.
It runs as the role of the pipeline's connection. If that role may not create publications, a DBA
creates them first (docs/reference/privileges.md).

- **dry_run**: show the plan and its SQL in the log of `set_up`, and change nothing.
- *If it fails*: `preflight` lists every problem with its remedy.
- Next: trigger `{name}_initial_sync` and unpause `{name}_cdc`. Until then the slot keeps the
  source's WAL.
""",
    "initial_sync": """\
Copies tables into the lake, through the publication's filter and columns, while the application
writes. `{name}_cdc` applies changes to a table as soon as its copy is complete.

- **tables**: the tables to copy, as `schema.table`. Empty: all tables without a complete copy.
- **reason**: stored in the ledger with the copy.
- **due**: of these, only tables that get no changes until they are copied.
- `{name}_cdc` triggers runs named `copy_again__…` for tables that need a new copy. Keep this DAG
  unpaused.
- *If it fails*: the next attempt copies the failed tables again, not the finished ones.
""",
    "cdc": """\
Brings the source's changes into the lake. `slot_has_changes` ends the run when there are none; it
still moves the slot, so that an idle table keeps no WAL. Otherwise: land → apply → check → report.

- **land**: makes changes durable in the lake, then moves the slot.
- **apply**: one commit per target and batch. A failing table does not delay the others.
- **check**: runs the expectations of changed targets. *If it fails*, the changes are applied; the
  log names the failed expectations and the report.
- **report**: emits one asset event per changed target that passed its critical expectations.
- **copy_again**: triggers `{name}_initial_sync` for large tables that need a new copy. *If it
  fails*, that DAG is paused.
- **fail_the_run**: fails the run when a stage failed, because check and report still run for the
  other tables.
- *If a run fails*, the next one continues. Clear a task to repeat its stage. Airflow does not retry
  errors that need an operator.
- **A backfill**, or a cleared run that had succeeded, *replays*: it brings the rows
  that its interval's runs changed to the source's present state. It can be repeated.
""",
    "resync": """\
Continues after the stream broke: the slot was lost, dropped or moved by another program, the source
was restored or replaced, or PostgreSQL cannot decode a change (`SlotLost`, `SlotMissing`,
`SlotGap`, `SourceChanged`, `SlotUnreadable`). It recreates the slot, compares each table with its
target by key, and writes only the rows that differ. It copies tables without a key completely.

- **tables**: the tables to repair, as `schema.table`. Empty: all that the new slot has no copy of.
- **reason**: stored in the ledger with the copy.
- With a healthy slot it only repairs the named or waiting tables.
- *If it fails*: run it again. It skips finished tables.
""",
    "quarantine": """\
Decides about rows in quarantine and about tables that an expectation with `gate: stop` stopped.
The user who triggered the run is recorded.

- **action**:
  `retry` reads quarantined rows from the source and evaluates their gates again;
  `accept` writes them even if they fail the gate;
  `discard` leaves new rows out, and updated ones in their older version;
  `release` lets the next run of `{name}_cdc` merge what has landed by now for the tables;
  `skip` continues without unreadable messages.
- **tables**: the tables; `release` needs them.
- **rows**: ids of single rows, for `accept`, `discard` and `skip`.
- **reason**: stored with the user; every action but `retry` needs it.
- *If it fails*: nothing was decided, or the named tables could not be read; run it again.
  `QualityFailed` means that the rows were written and an expectation failed.
""",
    "reconcile": """\
Compares targets with the source, while the application writes and `{name}_cdc` runs. It compares
checksums of one snapshot with one version of the target. Rows that changed during the comparison
are skipped.

- **tables**: the tables to compare, as `schema.table`. Empty: all replicated tables.
- **repair**: read the rows that differ again and correct them in the target.
- **reason**: stored in the ledger with the repair.
- *If it fails* with `TargetDiffers`: the page "reconciliation" shows the rows, columns and both
  values. Find out who wrote to the target, then trigger this DAG with **repair**.
- A table that cannot be compared does not fail the run; a warning says why.
""",
    "maintenance": """\
Compacts and vacuums the targets and the pipeline's own tables, and removes old reports. The change
log keeps {days} days, time travel {hours} hours.
""",
}


def dag_page(pipeline: PipelineFile, kind: str, path: str) -> str:
    """Markdown of one DAG's page."""
    keep = pipeline.maintenance
    text = _KINDS[kind].format(
        name=pipeline.pipeline, days=keep.keep_changes_days, hours=keep.keep_versions_hours
    )
    return "\n".join(
        [f"# {pipeline.pipeline}: {kind.replace('_', ' ')}", "", text, *_facts(pipeline, path)]
    )


def _facts(pipeline: PipelineFile, path: str) -> Iterator[str]:
    yield from ("| | |", "| --- | --- |")
    yield f"| pipeline file | `{path}` |"
    read_from = (
        f" on the standby of connection `{pipeline.source.read_from}`"
        if pipeline.source.read_from
        else ""
    )
    yield (
        f"| source | connection `{pipeline.source.conn_id}`, slot"
        f" `{pipeline.source.slot}`{read_from} |"
    )
    yield f"| target | `{pipeline.target.written_root}` |"
    yield f"| Spark | connection `{pipeline.spark_conn_id}` |"
    yield f"| pool | `{pipeline.pool}` (one slot; without the pool, tasks wait forever) |"
    for publication in pipeline.source.publications:
        # Names may have any characters.
        published = visible(" ".join("<br>".join(_published(publication)).split()))
        escaped = published.replace("|", "\\|")
        yield f"| publication `{publication.name}` | {escaped} |"


def _published(publication: Publication) -> Iterator[str]:
    yield ", ".join(publication.publish)
    if publication.all_tables:
        yield "all tables"
    yield from (f"schema `{schema}`" for schema in publication.schemas)
    for table in publication.tables:
        where = f" where `{table.where}`" if table.where else ""
        columns = f" ({', '.join(table.columns)})" if table.columns else ""
        without = f" without `{'`, `'.join(table.exclude)}`" if table.exclude else ""
        yield f"`{table.name}`{without}{columns}{where}"

"""The DAGs' pages in the UI (doc_md): what each does, what it needs, and what to do when it
fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from waldelta.config import PipelineFile, Publication

_KINDS = {
    "setup": (
        """\
Checks the source, then creates or alters what the pipeline needs there: publications first,
  then the slot.
Everything that would break the source is refused before anything is changed. Running it again
changes nothing.
It runs as the role of the pipeline's connection: publications that this may not make are made
before, by hand (docs/reference/privileges.md).

- **dry_run**: only show the plan and its SQL, in the log of `set_up`.
- *If it fails*: `preflight` lists every problem with its remedy.
- Next: trigger `{name}_initial_sync` and unpause `{name}_cdc`; until
  then the slot holds the source's WAL.
"""
    ),
    "initial_sync": (
        """\
Copies tables into the lake, through the
  publication's filter and columns. The stream goes on meanwhile:
`{name}_cdc` lands changes from the
  slot's creation on and applies them to a table once its copy is complete.

- **tables**: which ones to copy, as `schema.table`; empty: all that were never copied completely.
- **reason**: kept in the ledger beside the copy.
- **due**: of these, only tables that get no changes until they are copied.
- Runs named `copy_again__…` were triggered by `{name}_cdc`, for tables that have to be copied
  again. Keep this DAG unpaused.
- *If it fails*: a table whose copy broke starts again with the next attempt, finished ones don't.
"""
    ),
    "cdc": (
        """\
Brings the source's changes into the lake. `slot_has_changes` ends the run there when there are
none (it still
moves the slot, so that an idle table holds no WAL); otherwise land → apply → check → report.

- **land**: changes become durable in the lake, then the slot moves.
- **apply**: one commit per target and batch; a failing table doesn't hold up the others.
- **check**: expectations over the changed targets. *If it fails*, the changes are applied
  and safe; its log names
  the failed expectations and the report.
- **report**: an asset event, with counts and LSN range in `extra`,
  per changed target that is applied completely and
  met its critical expectations.
- **copy_again**: triggers `{name}_initial_sync` for large tables whose source changed in a way
  that the stream doesn't tell. *If
  it fails*, that DAG is paused.
- **fail_the_run**: turns the run red when a stage failed, since check and report
  then run for the other tables.
- *If a run fails*, the next one carries on; clear a task to try its stage again. An error that
  can't go away by
  itself isn't retried.
- **A backfill**, or a run that is cleared after it ended well, *replays*:
  from the change log it derives anew what the runs of its
  interval changed, and mends rows that differ. It leaves the slot alone
    and can be repeated; an interval without runs ends green at once.
"""
    ),
    "resync": (
        """\
Goes on after the stream broke: the slot was lost, dropped or moved by somebody else, the source
was restored or is another
server, or PostgreSQL can't decode a change (`SlotLost`, `SlotMissing`, `SlotGap`, `SourceChanged`,
`SlotUnreadable` in
`{name}_cdc`). Makes the slot anew, compares each table with its target by
key, and writes only the rows that differ; what has no key, or other columns, is copied as a whole.

- **tables**: which ones to mend, as `schema.table`; empty: all that the new slot has no copy of.
- **reason**: kept in the ledger beside the copy.
- With a slot that is fine, nothing is made anew: then it only mends the tables that are named,
  or waiting.
- *If it fails*: run it again; finished tables aren't compared again.
"""
    ),
    "quarantine": (
        """\
Decides on what a gate or the source kept out of the targets: rows in quarantine,
  and tables that an expectation with `gate: stop` holds
back. Who triggered the run is recorded with it.

- **action**: `retry` reads quarantined rows from the source again
  and judges them again: those that are fine now are written, the others
  stay, with the values that they have now. `accept` writes them whatever their gates say.
  `discard` leaves them out (or as
  they were) for good; `release` lets everything that has landed for the tables pass their `stop`
  gates, with the next run of `{name}_cdc`.
- **tables**: which ones; `release` needs them.
- **rows**: ids of single rows, for `accept` and `discard`; with another action the run fails at
  once, and nothing is tried again.
- **reason**: kept with who; `accept` and `release` need it.
- *If it fails*: nothing was decided, or the tables that are named couldn't be read: run it again.
  After a `retry` or an `accept` the tables
  are checked as a run's are: by `QualityFailed` the rows were put right, and an expectation isn't
    met.
"""
    ),
    "reconcile": (
        """\
Compares whole targets with the source, while writers and `{name}_cdc` go
  on: PostgreSQL sums up hashes of its rows as a snapshot
sees them, Spark those of a version of the target, and what was changed between the two is left out
  on both sides.

- **tables**: which ones to compare, as `schema.table`; empty: all that get changes.
- **repair**: read the rows that differ again, and put them right in the target.
- **reason**: kept in the ledger beside the repair.
- *If it fails* with `TargetDiffers`: the page "reconciliation" of the pipeline shows which rows,
  which columns, and both values;
  find out who wrote to the target, then trigger this DAG with **repair**,
    or press the page's button.
- A table that couldn't be compared doesn't fail the run: its warnings say why.
"""
    ),
    "maintenance": (
        """\
Compacts and cleans the targets and the
  pipeline's own tables, and removes old reports. It never goes below the
promised retention: the change log reaches back {days} days, time travel {hours} hours.
"""
    ),
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
    yield f"| pool | `{pipeline.pool}` (one slot; tasks wait for ever when it doesn't exist) |"
    for publication in pipeline.source.publications:
        yield f"| publication `{publication.name}` | {'<br>'.join(_published(publication))} |"


def _published(publication: Publication) -> Iterator[str]:
    yield ", ".join(publication.publish)
    if publication.all_tables:
        yield "all tables"
    yield from (f"schema `{schema}`" for schema in publication.schemas)
    for table in publication.tables:
        where = f" where `{_cell(table.where)}`" if table.where else ""
        columns = f" ({', '.join(table.columns)})" if table.columns else ""
        yield f"`{table.name}`{columns}{where}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

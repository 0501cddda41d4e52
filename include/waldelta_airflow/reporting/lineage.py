"""Lineage: what a run read and wrote, in the form that OpenLineage's provider requests.

Imported only where that provider is installed (``apache-airflow-providers-openlineage``); the rest
of waldelta doesn't need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from airflow.sdk import Connection
from openlineage.client.event_v2 import Dataset, OutputDataset
from openlineage.client.facet_v2 import RunFacet, output_statistics_output_dataset

from waldelta.config import PipelineFile, Publication, split_table_name
from waldelta.lake import target_uri
from waldelta.pipeline.after_commit import TargetCommit, commits_of

_PORT = 5432


@attr.define
class ReplicationRunFacet(RunFacet):  # type: ignore[misc]
    """The WAL range that a run replicated, the publications, and the filters of its tables."""

    startLsn: str | None = attr.field(default=None)  # noqa: N815  as OpenLineage writes names
    endLsn: str | None = attr.field(default=None)  # noqa: N815
    publications: list[str] = attr.field(factory=list)
    filters: dict[str, str] = attr.field(factory=dict)


def lineage(
    pipeline: PipelineFile, document: Mapping[str, Any], source: Connection
) -> OperatorLineage:
    """Returns inputs and outputs of the tables that a run of a source's ``database`` changed."""
    namespace = f"postgres://{source.host or 'localhost'}:{source.port or _PORT}"
    commits = commits_of(document)
    sources = {commit.table: _source(pipeline, commit.table) for commit in commits}
    inputs = [
        Dataset(namespace, ".".join((source.schema or "", *of)))
        for of in sorted(set(sources.values()))
    ]
    outputs = [_output(pipeline, commit) for commit in commits]
    published = {
        table: _published_filter(pipeline.source.publications, table)
        for table in set(sources.values())
    }
    places = {".".join(table): where for table, where in published.items() if where is not None}
    target_filters = {
        f"target {name}": where
        for name in sources
        if (where := pipeline.target.where_of(name)) is not None
    }
    facet = ReplicationRunFacet(
        document.get("start_lsn"),
        document.get("end_lsn"),
        pipeline.source.publication_names,
        dict(sorted((places | target_filters).items())),
    )
    return OperatorLineage(
        inputs=inputs, outputs=outputs, run_facets={"waldelta_replication": facet}
    )


def _source(pipeline: PipelineFile, table: str) -> tuple[str, str]:
    """Returns schema and name of a target's source table."""
    target = pipeline.target.tables.get(table)
    return split_table_name(target.source if target and target.source else table)


def _output(pipeline: PipelineFile, commit: TargetCommit) -> OutputDataset:
    name = pipeline.target.target_names.of(commit.table)
    place = urlsplit(target_uri(pipeline.target.root, *split_table_name(name)))
    namespace = f"{place.scheme}://{place.netloc}" if place.netloc else place.scheme
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        rowCount=commit.rows
    )
    return OutputDataset(namespace, place.path, outputFacets={"outputStatistics": statistics})


def _published_filter(publications: Iterable[Publication], table: tuple[str, str]) -> str | None:
    """Returns the publisher's filter of a table; None where all rows pass, or it is unknown.

    A row is sent when one of the publications lets it pass. The filters of a publication that isn't
    managed are unknown, whatever the file says.
    """
    filters: list[str] = []
    for publication in publications:
        of_schema = table[0] in publication.schemas
        if not publication.manage or publication.all_tables or of_schema:
            return None
        for entry in publication.entries_of(table):
            if entry.where is None:
                return None
            filters.append(entry.where)
    several = list(dict.fromkeys(filters))
    return (
        " or ".join(f"({where})" for where in several)
        if len(several) > 1
        else next(iter(several), None)
    )

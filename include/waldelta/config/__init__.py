"""What an engineer writes: the pipeline file and expectation files, parsed and validated."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.config.dag_ids import DagKind, dag_id_of
    from waldelta.config.pipeline_file import PipelineFile, load_pipeline_file
    from waldelta.config.source import Publication, Source, split_table_name
    from waldelta.config.type_options import TypeOptions

__all__ = [
    "DagKind",
    "PipelineFile",
    "Publication",
    "Source",
    "TypeOptions",
    "dag_id_of",
    "load_pipeline_file",
    "split_table_name",
]
__getattr__ = lazy_exports(
    __name__,
    dag_ids="DagKind dag_id_of",
    pipeline_file="PipelineFile load_pipeline_file",
    source="Publication Source split_table_name",
    type_options="TypeOptions",
)

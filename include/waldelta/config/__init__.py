"""What an engineer writes: the pipeline file and expectation files, parsed and validated."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.config.pipeline_file import PipelineFile, load_pipeline_file
    from waldelta.config.source import Publication, Source, split_table_name
    from waldelta.config.type_options import TypeOptions

__all__ = [
    "PipelineFile",
    "Publication",
    "Source",
    "TypeOptions",
    "load_pipeline_file",
    "split_table_name",
]
__getattr__ = lazy_exports(
    __name__,
    pipeline_file="PipelineFile load_pipeline_file",
    source="Publication Source split_table_name",
    type_options="TypeOptions",
)

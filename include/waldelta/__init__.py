"""PostgreSQL's logical replication into Delta Lake; ``Pipeline`` is its Python API.

The packages stand in the order of the flow in docs/architecture.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waldelta.jobs.pipeline import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    # Importing any module of the library imports this one first: the API is loaded where it is
    # used.
    if name == "Pipeline":
        from waldelta.jobs.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""PostgreSQL logical replication into Delta Lake; ``Pipeline`` is the Python API.

The packages stand in the order of the flow in CONTRIBUTING.md.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.jobs import Pipeline

__all__ = ["Pipeline"]
__getattr__ = lazy_exports(__name__, jobs="Pipeline")

"""Facts about the source on which setup and preflight base their decisions."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.facts.publications import PublicationState
    from waldelta.stages.setup.facts.source_facts import Facts, read_facts

__all__ = ["Facts", "PublicationState", "read_facts"]
__getattr__ = lazy_exports(
    __name__, publications="PublicationState", source_facts="Facts read_facts"
)

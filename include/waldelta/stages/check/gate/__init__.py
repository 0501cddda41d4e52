"""Gates: decide what happens to rows and tables whose expectations fail."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.gate.gate import TableGate, read_gates
    from waldelta.stages.check.gate.quarantined_rows import discard_quarantined, list_quarantined
    from waldelta.stages.check.gate.release import release_tables

__all__ = ["TableGate", "discard_quarantined", "list_quarantined", "read_gates", "release_tables"]
__getattr__ = lazy_exports(
    __name__,
    gate="TableGate read_gates",
    quarantined_rows="discard_quarantined list_quarantined",
    release="release_tables",
)

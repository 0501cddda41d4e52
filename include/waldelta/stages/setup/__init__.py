"""Stage setup: creates or alters publications and slots, after preflight found no problem."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.setup.setup import Judges, SetupPlan, apply_setup, plan_setup, teardown

__all__ = ["Judges", "SetupPlan", "apply_setup", "plan_setup", "teardown"]
__getattr__ = lazy_exports(__name__, setup="Judges SetupPlan apply_setup plan_setup teardown")

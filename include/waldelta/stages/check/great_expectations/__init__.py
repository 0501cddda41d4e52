"""Great Expectations: imports it, builds and runs suites, and adds expectations of our own."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.great_expectations.build import build_suite
    from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
    from waldelta.stages.check.great_expectations.run_suite import SuiteCheck

__all__ = ["SuiteCheck", "build_suite", "import_great_expectations"]
__getattr__ = lazy_exports(
    __name__, build="build_suite", lazy_import="import_great_expectations", run_suite="SuiteCheck"
)

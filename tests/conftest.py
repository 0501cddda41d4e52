"""Fixtures shared by all layers; each family of fixtures has a module of its own."""

import gc

import pytest

from tests import tiers

pytest_plugins = [
    "tests.support.fixtures.postgres",
    "tests.support.fixtures.spark",
    "tests.support.fixtures.airflow",
    "tests.support.fixtures.stores",
]

# Nothing that importing makes is garbage: see pytest_collection_finish().
gc.disable()

# What a test needs, by the fixtures that give it.
_NEEDS = {"pg": {"postgres", "any_postgres", "new_server"}, "spark": {"spark_jvm"}}


class _Failures:
    """Prints the cause of a failure when it happens: a run that CI ends early has named it."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr) if crash is None else crash.message
            first = message.strip().partition("\n")[0]
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} ({report.when}): {first}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report failures at once where there is a terminal: not in the processes of pytest-xdist."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(terminal))
        config.pluginmanager.register(tiers.Record())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder and by what they need, before marks choose; give long tests time."""
    for item in items:
        for folder in ("unit", "e2e"):
            if item.nodeid.startswith(f"tests/{folder}/"):
                item.add_marker(folder)
        for need, fixtures in _NEEDS.items():
            if not fixtures.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(need)
        if limit_s := tiers.limit_s({mark.name for mark in item.iter_markers()}):
            item.add_marker(pytest.mark.timeout(limit_s))


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_collection_order(items: list[pytest.Item]) -> None:
    """Let one of pytest-xdist's processes have the tests that use Spark, behind those of e2e.

    Each process begins with a part of the list, and takes from the end of another's. A JVM that is
    started and has loaded what it needs takes 40 s of CPU.
    """
    first = tiers.tests_on_spark()
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, item.nodeid not in first))


def pytest_collection_finish() -> None:
    """Leave imported modules out of the garbage collector's passes: a tenth of the unit tests."""
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)
    gc.enable()

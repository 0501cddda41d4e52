"""``python -m tests.pictures docs/images``: the pictures of docs/reference/ui.md."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from selenium.webdriver.remote.webdriver import WebDriver

from tests.pictures.lakes import run_id, write_lake
from tests.pictures.story import AT, NOT_SET_UP, TALES, Tale
from tests.support.browser import CUT, open_browser, prefer
from tests.support.plugin_app import plugin_app, serve
from waldelta.config import PipelineFile, load_pipeline_file

if TYPE_CHECKING:
    from waldelta_airflow.views._installed_pipelines import Schedule

# What Airflow leaves to a page in a window of 1,440 pixels.
_WIDTH = 1340
# name -> address, scheme, height
PICTURES = {
    "ui-pipelines": ("/", "light", 1200),
    "ui-pipeline": ("/p/orders", "light", 1000),
    "ui-table": ("/p/orders/table/public.invoices", "dark", 880),
    "ui-run": (f"/p/orders/run/consume/{run_id(TALES[3].runs()[-1])}", "light", 900),
    "ui-expectations": ("/p/orders/expectations", "light", 900),
    "ui-reconciliation": ("/p/orders/reconciliation", "dark", 900),
}
_PIPELINE = """\
pipeline: {name}
source:
  conn_id: {name}_source
  slot: {name}_cdc
  publications: [{{name: {name}_pub, tables: [{tables}]}}]
target: {{root: 'file://{folder}/lakes/{name}'}}
schedule: "*/{every} * * * *"
"""


def write_story(folder: Path, tales: Iterable[Tale] = TALES) -> None:
    """The pipelines' files, and their lakes."""
    for tale in tales:
        write_lake(
            load_pipeline_file(write_file(folder, tale.name, list(tale.tables), tale.every)), tale
        )
    write_file(folder, NOT_SET_UP, ["public.employees"], 15)


def write_file(folder: Path, name: str, tables: list[str], every: int) -> Path:
    """A pipeline's file."""
    path = folder / f"{name}.yml"
    listed = ", ".join(f"{{name: {table}}}" for table in tables)
    path.write_text(_PIPELINE.format(name=name, tables=listed, folder=folder, every=every))
    return path


@contextmanager
def served(folder: Path, known: "Mapping[str, Schedule] | None" = None) -> Iterator[str]:
    """The plugin's application, as an admin sees it at the story's time; ``known`` is what Airflow
    says of other pipelines than the story's.
    """
    os.environ |= {"AIRFLOW_HOME": str(folder / "airflow"), "WALDELTA_PIPELINES": str(folder)}
    from waldelta.monitoring import glance_cache
    from waldelta_airflow.views import _overview as overview
    from waldelta_airflow.views import _pages as pages
    from waldelta_airflow.views import _render as render
    from waldelta_airflow.views._installed_pipelines import DagRunTasks

    glance_cache.FIRST_S = glance_cache.AGAIN_S = 60.0
    known = {tale.name: tale.schedule() for tale in TALES} | dict(known or {})

    def schedules(files: list[PipelineFile], **_: object) -> "dict[str, Schedule]":
        return {f.pipeline: known[f.pipeline] for f in files if f.pipeline in known}

    with (
        patch.object(pages, "read_schedules", schedules),
        patch.object(overview, "read_schedules", schedules),
        patch.object(
            pages,
            "read_dag_run",
            lambda *_: DagRunTasks("success", frozenset({"land", "apply", "check", "report"})),
        ),
        patch.object(pages, "now", lambda: AT),
        patch.object(overview, "now", lambda: AT),
        patch.object(render, "now", lambda: AT),
        serve(plugin_app("admin", "admin")) as base,
    ):
        yield base


def take(browser: WebDriver, address: str, path: Path, width: int, height: int) -> None:
    """The top of a page, or all of a shorter one."""
    view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.get(address)
    used = browser.execute_script(
        "const whole = document.querySelector('main') ?? document.body;"
        " return Math.ceil(whole.getBoundingClientRect().bottom)"
    )
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", view | {"height": min(height, used)}
    )
    if any(cut := browser.execute_script(CUT)):
        sys.exit(f"{address}: tables are wider than the page, by pixels: {cut}")
    browser.save_screenshot(str(path))


def main() -> None:
    """Write the story's lakes, serve the pages and take the pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--width", type=int, default=_WIDTH)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="waldelta-pictures-") as name:
        write_story(Path(name))
        with served(Path(name)) as base, open_browser() as browser:
            for picture, (page, scheme, height) in PICTURES.items():
                prefer(browser, scheme)
                take(browser, base + page, asked.folder / f"{picture}.png", asked.width, height)
                sys.stdout.write(f"{asked.folder / picture}.png\n")


if __name__ == "__main__":
    main()

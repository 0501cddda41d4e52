"""``python -m tests.pictures.tour docs/images``: README's pictures, of the demo after somebody has
written to one of its targets.

Plays the demo first, which takes minutes, and deletes an earlier one's data in ``--folder``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from deltalake import DeltaTable
from rich.console import Console
from selenium.webdriver.remote.webdriver import WebDriver

from demo.airflow_client import AirflowError
from demo.run_demo import CDC, PIPELINE, Demo
from demo.stack import Stack
from demo.stack.airflow_entries import environment_of
from tests.pictures.__main__ import take
from tests.support.browser import open_browser, prefer
from tests.support.plugin_app import plugin_app, serve
from waldelta.lake import target_uri

_WIDTH, _HEIGHT = 1240, 900
_RECONCILE = f"{PIPELINE}_reconcile"


def main() -> None:
    """Play the demo, tamper with a target, reconcile, and write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.pictures.tour", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waldelta-tour-") as data:
        stack = Stack(Path(data), report=print)
        with stack:
            demo = Demo(stack, Console())
            demo.run()
            _write_behind_its_back(demo)
            run_id = _reconciled(stack)
            with (
                environment_of(stack.airflow.environment(stack.places())),
                serve(plugin_app("admin", "admin")) as base,
            ):
                pages = {
                    "pipeline": "",
                    "reconciliation": "/reconciliation",
                    "run": f"/run/consume/{run_id}",
                }
                with open_browser() as browser:
                    prefer(browser, "light")
                    for name, page in pages.items():
                        path = asked.folder / f"tour-{name}.png"
                        take(browser, f"{base}/p/{PIPELINE}{page}", path, _WIDTH, _HEIGHT)
                        sys.stdout.write(f"{path}\n")
                    take_data_docs(browser, stack.folder / "lake", asked.folder)


def take_data_docs(browser: WebDriver, lake: Path, folder: Path) -> None:
    """The page of the latest check of the flights."""
    pages = (lake / "_waldelta/data_docs/checks").rglob("public.flights.html")
    latest = max(pages, key=lambda page: page.stat().st_mtime)
    path = folder / "data-docs.png"
    take(browser, latest.as_uri(), path, _WIDTH, _HEIGHT)
    sys.stdout.write(f"{path}\n")


def _write_behind_its_back(demo: Demo) -> None:
    table = DeltaTable(target_uri(demo.pipeline.target.root, "public", "airlines"))
    first, second, *_ = sorted(table.to_pyarrow_table(columns=["carrier"])["carrier"].to_pylist())
    table.delete(f"carrier = '{first}'")
    table.update(updates={"name": "'Tampered Air'"}, predicate=f"carrier = '{second}'")


def _reconciled(stack: Stack) -> str:
    """Has the difference found; the newest run of CDC."""
    with stack.client() as airflow:
        airflow.unpause(_RECONCILE)
        try:
            airflow.run_to_end(_RECONCILE, timeout_s=600)
        except AirflowError:
            pass  # it fails, since it finds something
        else:
            raise SystemExit(f"{_RECONCILE} found nothing")
        return airflow.runs(CDC)[0].run_id


if __name__ == "__main__":
    main()

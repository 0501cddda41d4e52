"""``python -m tests.pictures.situations FOLDER``: twelve situations, with a picture of each.

A reader who knows nothing else says of each picture what is wrong and what to do. The pictures have
numbers for names, and ``truth.md`` next to the folder has what is right.
"""

import argparse
import random
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tests.pictures.__main__ import served, take, write_file, write_story
from tests.pictures.lakes import run_id
from tests.pictures.story import AT, NOT_SET_UP, TALES, TAMPERED, Tale, Trouble, today
from tests.support.browser import open_browser, prefer
from waldelta.config import load_pipeline_file
from waldelta.errors import SourceUnreachable
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, TableState

if TYPE_CHECKING:
    from waldelta_airflow.views._installed_pipelines import Schedule

_AWAY = SourceUnreachable('connection to server at "shop-db", port 5432 failed: timeout expired')
# Pipelines that the story lacks; each has one trouble.
_OTHERS = (
    Tale("shipping", 5, {"public.parcels": 800, "public.labels": 420}, 0x1_10000000,
         (Trouble(today(11, 45), AT, "land", _AWAY),)),
    Tale("payroll", 15, {"public.salaries": 60, "public.hours": 900}, 0x1_20000000,
         until=today(10, 45)),
    Tale("sales", 5, {TAMPERED: 130, "public.leads": 300}, 0x1_30000000),
    Tale("wallet", 5, {"public.payments": 540, "public.cards": 75}, 0x1_40000000, is_gated=True),
)  # fmt: skip
# A pipeline whose first copy is under way: name, tables that are copied, table in work.
_COPYING = ("catalog", ("public.brands", "public.prices"), "public.products")


@dataclass(frozen=True, slots=True)
class Picture:
    """A page of a pipeline, what is wrong there, and what to do."""

    page: str
    wrong: str
    remedy: str


def _pictures() -> list[Picture]:
    check = run_id(today(11, 40))
    return [
        Picture("billing/table/public.plans", "a column changed its type; the table's changes wait",
                "copy public.plans again (button), or set schema_changes: evolve"),
        Picture("inventory", "the slot is lost, changes are gone",
                "run the resync DAG with a reason (button)"),
        Picture("loyalty", "the CDC DAG is paused", "unpause it (button)"),
        Picture(f"orders/run/consume/{check}", "a check failed: refunds has 2 rows with a status"
                " that its enum lacks", "look at the rows, correct them at the source"),
        Picture("web_events", "the slot keeps 6 GB of WAL for a transaction that is open",
                "end the oldest transaction on the source (command)"),
        Picture("customers", "nothing", "nothing"),
        Picture(NOT_SET_UP, "not set up: setup is done, the initial sync is next",
                "run hr_initial_sync (button)"),
        Picture(_COPYING[0], "nothing: the first copy is under way", "wait until it ends"),
        Picture("payroll", "the next run is overdue: Airflow's scheduler is down",
                "start the scheduler"),
        Picture("sales", "public.invoices differs from its source: a notebook wrote to it",
                "revoke its permission, then repair (button)"),
        Picture("shipping", "the source server doesn't answer",
                "get the server or the network back; runs try again by themselves"),
        Picture("wallet", "3 rows of payments are in quarantine: a gate keeps them out",
                "decide: retry, accept or discard the rows (button)"),
    ]  # fmt: skip


def _schedules() -> "dict[str, Schedule]":
    from waldelta_airflow.views._installed_pipelines import PIPELINE_DAGS, DagState, Schedule

    def new(name: str, **states: tuple[str, str]) -> Schedule:
        begun = AT - timedelta(minutes=14)
        dags = (
            DagState(kind, f"{name}_{kind}", kind == "cdc", *states.get(kind, (None, None)), begun)
            for kind in PIPELINE_DAGS
        )
        return Schedule(dags=tuple(dags), is_paused=True)

    name = _COPYING[0]
    copying = new(name, setup=("manual__s", "success"), initial_sync=("manual__sync", "running"))
    known = {tale.name: tale.schedule() for tale in _OTHERS}
    cdc = tuple(replace(state, is_paused=False) for state in copying.dags)
    return known | {
        NOT_SET_UP: new(NOT_SET_UP, setup=("manual__s", "success")),
        name: replace(copying, dags=cdc, is_paused=False, next_run_at=AT + timedelta(minutes=2)),
    }


def _write_copying(folder: Path) -> None:
    name, copied, table = _COPYING
    path = write_file(folder, name, [*copied, table], 5)
    ledger = Ledger(Lake(load_pipeline_file(path).target.root))
    state = TableState(AT - timedelta(minutes=3), "manual__sync", table, 1, "copying", rows=0)
    done = [replace(state, table_name=one, status="synced", rows=1_204_331) for one in copied]
    ledger.append_all([*done, state])


def main() -> None:
    """Write the lakes, and take the pictures in a random order."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--seed", type=int, default=47)
    asked = options.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    pictures, truth = _pictures(), []
    random.Random(asked.seed).shuffle(pictures)
    with tempfile.TemporaryDirectory(prefix="waldelta-situations-") as name:
        folder = Path(name)
        write_story(folder, (*TALES, *_OTHERS))
        _write_copying(folder)
        with served(folder, _schedules()) as base, open_browser() as browser:
            for number, picture in enumerate(pictures, 1):
                prefer(browser, "dark" if number % 4 == 0 else "light")
                width = 900 if number % 3 == 0 else 1400
                path = asked.folder / f"{number:02}.png"
                take(browser, f"{base}/p/{picture.page}", path, width, 1000)
                truth.append(f"- {path.name} ({picture.page}): {picture.wrong}; {picture.remedy}")
    asked.folder.with_name(f"{asked.folder.name}_truth.md").write_text("\n".join(truth) + "\n")


if __name__ == "__main__":
    main()

"""A made-up shop's pipelines on a Monday morning, and what has befallen some of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from waldelta.errors import QualityFailed, SchemaChanged, SlotLost, SourceUnreachable, WaldeltaError
from waldelta.pipeline.drift.type_change import TypeChange

if TYPE_CHECKING:
    from waldelta_airflow.views._installed_pipelines import Schedule

AT = datetime(2026, 11, 23, 11, 58, 2, tzinfo=UTC)
# Longer than any page looks back for rows of tables.
SINCE = datetime(2026, 11, 16, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Runs of a time that fail, at which stage and by what, and tables that they don't bring up to
    date or that fail their check.

    A table that failed its check isn't changed afterwards.
    """

    first: datetime
    last: datetime
    stage: str
    error: WaldeltaError
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tale:
    """A pipeline: how often it runs and until when, and its tables with their changed rows."""

    name: str
    every: int
    tables: dict[str, int]
    lsn: int
    troubles: tuple[Trouble, ...] = ()
    until: datetime = AT
    is_paused: bool = False
    held: int = 24 << 20
    # Which night its tables were last compared with their source, none of these ever.
    compared: datetime | None = datetime(2026, 11, 23, 2, 30, tzinfo=UTC)
    uncompared: tuple[str, ...] = ()
    # An expectation that only warns: when it wasn't met, or couldn't be evaluated, by table.
    warned: dict[str, tuple[datetime, ...]] = field(default_factory=dict)
    unknown: dict[str, tuple[datetime, ...]] = field(default_factory=dict)
    # DAGs with a run that is under way; whether a gate keeps rows of payments out of the target.
    under_way: tuple[str, ...] = ()
    is_gated: bool = False

    def schedule(self) -> Schedule:
        """What Airflow's database would say."""
        from waldelta_airflow.views._installed_pipelines import PIPELINE_DAGS, DagState, Schedule

        runs = [at for at in self.runs() if self.trouble(at) is None]
        due = None if self.is_paused else self.runs()[-1] + self.step
        state = "success" if self.trouble(last := self.runs()[-1]) is None else "failed"
        cdc = (f"scheduled__{last.isoformat()}", state, last)
        dags = {kind: DagState(kind, f"{self.name}_{kind}") for kind in PIPELINE_DAGS}
        dags["cdc"] = DagState("cdc", f"{self.name}_cdc", self.is_paused, *cdc)
        for kind in self.under_way:
            begun = ("manual__now", "running", AT - timedelta(seconds=40))
            dags[kind] = DagState(kind, f"{self.name}_{kind}", False, *begun)
        succeeded_at = runs[-1] if runs else None
        dags_of = tuple(dags.values())
        return Schedule(self.is_paused, next_run_at=due, succeeded_at=succeeded_at, dags=dags_of)

    @property
    def step(self) -> timedelta:
        """From run to run."""
        return timedelta(minutes=self.every)

    def runs(self) -> list[datetime]:
        """When its runs began."""
        return [SINCE + self.step * n for n in range((self.until - SINCE) // self.step + 1)]

    def trouble(self, at: datetime) -> Trouble | None:
        """What the run of that time fails by."""
        return next(
            (trouble for trouble in self.troubles if trouble.first <= at <= trouble.last), None
        )


def today(hour: int, minute: int = 0) -> datetime:
    """A time of the day that the pictures are of; hours before it are negative."""
    return AT.replace(hour=0, minute=minute, second=0) + timedelta(hours=hour)


_AWAY = SourceUnreachable('connection to server at "orders-db", port 5432 failed: timeout expired')
_RETYPED = SchemaChanged(
    "public.plans: ALTER TABLE rewrote column amount, and PostgreSQL doesn't replicate rewrites;"
    f" {TypeChange('amount', 'numeric(12,2)', 'numeric(14,4)')}; its changes wait in the change"
    " log: sync this table again (initial sync with tables=public.plans), or let runs follow such"
    " changes with schema_changes: evolve"
)
_LOST = SlotLost(
    "slot 'inventory_cdc' is lost (wal_removed): changes since <landed> are gone; run resync, and"
    " raise max_slot_wal_keep_size or run more often"
)
_UNMET = QualityFailed(
    "1 critical expectation failed (the changes are applied and safe):\n"
    "  - public.refunds: status has labels of its enum only: 2 rows"
)
# Who wrote to the target of orders' invoices, an update and a delete, and which rows differ by it.
NOTEBOOK = today(-8, 42)
TAMPERED = "public.invoices"

TALES = (
    Tale("billing", 15,
         {"public.accounts": 30, "public.plans": 4, "public.subscriptions": 310,
          "public.charges": 2600}, 0x3_1A000000,
         (Trouble(today(11), AT, "apply", _RETYPED, ("public.plans",)),), held=32 << 20),
    Tale("inventory", 15,
         {"public.items": 420, "public.bins": 90, "public.movements": 7100, "public.counts": 350},
         0x4_E0000000, (Trouble(today(11, 15), AT, "land", _LOST),)),
    Tale("loyalty", 15, {"public.members": 120, "public.points": 1500}, 0x2_40000000,
         until=today(9, 46), is_paused=True, compared=None),
    Tale("orders", 5,
         {"public.order_lines": 1400, "public.orders": 610, "public.payments": 540,
          "public.shipments": 330, "public.invoices": 130, "public.refunds": 9}, 0x5_00000000,
         (Trouble(today(-1, 55), today(-1, 55), "land", _AWAY),
          Trouble(today(6), today(6, 5), "land", _AWAY),
          Trouble(today(11, 40), today(11, 40), "check", _UNMET, ("public.refunds",))),
         warned={"public.invoices": (today(9, 45), today(10, 30)),
                 "public.shipments": (today(10, 5),)},
         unknown={"public.payments": (today(10, 20),)}, under_way=("reconcile",), is_gated=True),
    Tale("web_events", 5, {"public.visits": 900, "public.clicks": 2300, "public.searches": 420},
         0xC_20000000, held=(6 << 30) + (90 << 20), uncompared=("public.searches",)),
    Tale("crm", 15,
         {"public.contacts": 260, "public.companies": 40, "public.deals": 130, "public.calls": 480,
          "public.notes": 390}, 0x1_70000000, compared=today(-45, 30)),
    Tale("customers", 5,
         {"public.customers": 340, "public.addresses": 280, "public.consents": 190,
          "public.logins": 1750}, 0x6_90000000, held=31 << 20),
)  # fmt: skip
NOT_SET_UP = "hr"

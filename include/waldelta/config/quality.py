"""The pipeline file's ``quality``: what is checked after each run, and when a result is a
warning.
"""

from __future__ import annotations

from typing import Literal, Self, TypeAlias, get_args

from pydantic import Field, field_validator, model_validator

from waldelta.config.expectation_files import Severity
from waldelta.config.parse_text import StrictModel, refuse_if
from waldelta.config.schedule import Schedule
from waldelta.config.stores import check_folder_uri

LagUnit: TypeAlias = Literal["seconds", "mb"]


class Reconcile(StrictModel):
    """Comparisons of whole targets with the source."""

    schedule: Schedule | None = Field(
        None, description="cron expression (UTC) of the DAG _reconcile; null: triggered by hand"
    )


class Freshness(StrictModel):
    """How far the targets may lag behind the source when a run checks them; null: not judged."""

    warn_seconds: int | None = Field(
        3600,
        ge=1,
        description="warn when a target is more seconds behind the source; null: never",
    )
    critical_seconds: int | None = Field(
        None, ge=1, description="fail the check when a target is more seconds behind"
    )
    warn_mb: int | None = Field(None, ge=1, description="warn when more MB of WAL are unread")
    critical_mb: int | None = Field(
        None, ge=1, description="fail the check when more MB of WAL are unread"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for unit in get_args(LagUnit):
            limits = [*self.limits(unit).values()]
            refuse_if(
                "warn_" + unit in self.model_fields_set and limits != sorted(limits),
                f"warn_{unit} is more than critical_{unit}: swap them",
            )
        return self

    def limits(self, unit: LagUnit) -> dict[Severity, int]:
        """Returns the limits of a lag in a unit, as far as there are some, the warning first."""
        limits: dict[Severity, int | None] = {
            "warning": getattr(self, f"warn_{unit}"),
            "critical": getattr(self, f"critical_{unit}"),
        }
        return {severity: limit for severity, limit in limits.items() if limit is not None}


class Drift(StrictModel):
    """When a target's row count, or the distribution of its columns, counts as a profile
    anomaly.
    """

    enabled: bool = Field(True, description="measure the targets and compare the measurements")
    after_runs: int = Field(
        10,
        ge=3,
        description="number of measured runs before a table is compared",
    )
    of_runs: int = Field(20, ge=3, le=100, description="number of latest runs to compare with")
    factor: float = Field(
        6.0,
        gt=0,
        description="limit of the distance to the median, in MAD (median absolute deviation)",
    )
    tolerance: float = Field(
        0.5,
        gt=0,
        description=(
            "smallest distance to the median that can be an anomaly: as a share of the median"
            " row count; for a column's mean, of its standard deviation"
        ),
    )

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        refuse_if(
            self.of_runs < self.after_runs,
            "of_runs is less than after_runs, so no table would ever be compared: raise it",
        )
        return self


class Quality(StrictModel):
    """Checks after each run."""

    enabled: bool = Field(True, description="check the targets after each run")
    suites: str | None = Field(
        None,
        description=(
            "folder of your own expectations, relative to the pipeline file; by default"
            " ../expectations/<pipeline>"
        ),
    )
    data_docs: str | None = Field(
        None,
        description=(
            "local folder of the HTML reports; by default <root>/_waldelta/data_docs, also in an"
            " object store"
        ),
    )
    keep_reports: int = Field(
        50, ge=1, description="number of runs whose reports maintenance keeps"
    )
    full_check: Schedule | None = Field(
        "@daily",
        description=(
            "cron expression (UTC): the first _maintenance after each such time checks all rows of"
            " the targets that changed; null: only validate does"
        ),
    )
    reconcile: Reconcile = Field(Reconcile(), description="comparison of targets with the source")
    freshness: Freshness = Field(Freshness(), description="how far behind targets may be")
    drift: Drift = Field(Drift(), description="anomalies of row counts and distributions")

    @field_validator("data_docs")
    @classmethod
    def _on_this_machine(cls, place: str | None) -> str | None:
        check_folder_uri(place or "")
        refuse_if(
            place is not None and "://" in place and not place.startswith("file://"),
            "it names an object store: name a local folder, or remove the key, and reports are"
            " in the lake",
        )
        return place

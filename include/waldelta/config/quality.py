"""The pipeline file's ``quality``: what is checked after each run, and when a result is a
warning; and schedules, which are validated without Airflow as the DAGs' timetable reads them.
"""

from __future__ import annotations

import posixpath
import re
from datetime import UTC, datetime
from itertools import dropwhile
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from waldelta.config.parse_text import StrictModel, refuse_if

# A preset of Airflow's alone; croniter knows the others too.
_PRESETS = {"@quarterly": "0 0 1 */3 *"}
# croniter draws a new random time whenever it reads the expression.
_RANDOM = re.compile(r"(?<![a-z])r(?![a-z])", re.IGNORECASE)
_REMEDY = (
    "write five fields such as '*/10 * * * *', or @hourly, @daily, @weekly, @monthly, @quarterly,"
    " @yearly; null: the DAG is triggered by hand"
)
_FILE_URI = re.compile(r"file:///[^/~]")
# Stores whose URIs begin with a bucket or container, perhaps of an account.
_IN_BUCKETS = frozenset({"s3", "s3a", "gs", "abfs", "abfss"})
# Schemes that delta-rs, Arrow and Hadoop can all write to.
_SCHEMES = _IN_BUCKETS | {"file", "hdfs"}
_BUCKET = re.compile(r"//[^/@:]+(@[^/@:]+)?(:\d+)?(/|$)")


def check_folder_uri(value: str) -> None:
    """Raise ValueError for a URI that names no folder.

    That is a URI of an unknown scheme or without a bucket, or a file: URI without an absolute path.
    In file://tmp/x, tmp is a host, so /x would be written. Other values pass.
    """
    scheme, _, rest = value.partition(":")
    kind = scheme.lower()
    of_account = "@account.dfs.core.windows.net" if kind.startswith("abfs") else ""
    refuse_if(
        rest.startswith("//") and kind not in _SCHEMES,
        f"no lake can be written to {scheme}://: write file://, or a store's scheme"
        f" ({', '.join(sorted(_SCHEMES - {'file'}))})",
    )
    refuse_if(
        kind in _IN_BUCKETS and not _BUCKET.match(rest),
        f"it names no bucket: write {scheme}://bucket{of_account}/folder",
    )
    refuse_if(
        kind != "file" and rest.startswith("//") and ".." in rest.split("/"),
        "a store knows no parent folder: write the path without ..",
    )
    if kind == "file":
        _check_file_uri(value, [part for part in rest.split("/") if part])


def _check_file_uri(value: str, parts: list[str]) -> None:
    # Parts that don't begin an absolute path: a host, the current folder, a home that only a shell
    # knows.
    path = "/" + "/".join(
        dropwhile(lambda part: part in ("localhost", ".", "..") or part.startswith("~"), parts)
    )
    normal = posixpath.normpath(path)
    refuse_if(
        normal == "/",
        "it names no folder below the file system's root: write file:// and an absolute path",
    )
    refuse_if(parts[:1] == [".."], f"nothing is above the file system's root: write file://{path}")
    refuse_if(".." in parts, f"it leads through a parent folder: write file://{normal}")
    refuse_if(
        not _FILE_URI.match(value),
        "a file URI is file:// and an absolute path, so that three slashes begin it: write"
        f" file://{path}, if that is the folder",
    )


def check_schedule(text: str) -> str:
    """Returns the schedule as written; raises ValueError for one that the DAGs can't use."""
    # Imported only when needed: the import takes as long as the rest of a pipeline file without a
    # schedule.
    from croniter import croniter

    try:
        times = croniter(_PRESETS.get(text, text), datetime.now(UTC))
    except Exception as err:
        raise ValueError(f"not a cron expression ({err}): {_REMEDY}") from err
    if _RANDOM.search(text):
        raise ValueError(f"a random time, which changes whenever Airflow reads the file: {_REMEDY}")
    try:
        # An interval needs both: Airflow runs at its end, and it begins at the previous time.
        times.get_prev()
        times.get_next()
    except Exception as err:
        raise ValueError(f"times that never come, or never came: {_REMEDY}") from err
    return text


Schedule = Annotated[str, AfterValidator(check_schedule)]


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
        for unit in ("seconds", "mb"):
            warn, critical = getattr(self, f"warn_{unit}"), getattr(self, f"critical_{unit}")
            refuse_if(
                "warn_" + unit in self.model_fields_set and warn and critical and warn > critical,
                f"warn_{unit} is more than critical_{unit}: swap them",
            )
        return self


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
        description="smallest share that can be an anomaly",
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

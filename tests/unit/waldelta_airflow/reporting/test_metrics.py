"""What a result says arrives through Airflow's channel, by the documented names."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from airflow.sdk.observability import stats
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

from waldelta_airflow.reporting.metrics import differing_rows, emit, metrics_of

AT = datetime(2030, 1, 1, 12, tzinfo=UTC)
DOCUMENT = {
    "verb": "consume",
    "changes": 12,
    "lag_bytes": 512,
    "as_of": (AT - timedelta(seconds=30)).isoformat(),
    "slot_after": {"retained_bytes": 4096},
    "stages": {"land": {"seconds": 1.5}, "apply": {"seconds": 3}},
    "tables": {"public.flights": {"inserted": 4, "updated": 2, "deleted": 1, "quarantined": 1,
                                  "differing": 3}, 'public."odd.n"': {},
               "public.mended": {"updated": 5, "differing": 5}},
    "passed": ["public.mended"],
    "failed_expectations": ["one"],
    "warned_expectations": ["two", "three"],
    "not_applied": [],
    "store_requests": 127,
}  # fmt: skip
PAGE = (Path(__file__).parents[4] / "docs/reference/metrics.md").read_text()


def test_a_document_becomes_its_metrics():
    found = {
        metric.name: metric.value for metric in metrics_of("shop", DOCUMENT, AT) if metric.value
    }
    assert found == {
        "waldelta.shop.consume.changes": 12, "waldelta.shop.lag_bytes": 512,
        "waldelta.shop.lag_seconds": 30.0, "waldelta.shop.retained_wal_bytes": 4096,
        "waldelta.shop.consume.seconds.land": 1.5, "waldelta.shop.consume.seconds.apply": 3.0,
        "waldelta.shop.consume.rows.public_flights.inserted": 4,
        "waldelta.shop.consume.rows.public_flights.updated": 2,
        "waldelta.shop.consume.rows.public_flights.deleted": 1,
        "waldelta.shop.consume.rows.public_flights.quarantined": 1,
        "waldelta.shop.consume.rows.public_mended.updated": 5,
        "waldelta.shop.differing_rows.public_flights": 3,
        "waldelta.shop.consume.failed_expectations": 1,
        "waldelta.shop.consume.warned_expectations": 2, "waldelta.shop.consume.store_requests": 127,
    }  # fmt: skip


def test_the_page_lists_every_name():
    """And no other one."""
    listed = re.findall(r"^- `(waldelta\.\S+)` \((gauge|counter)\)", PAGE, re.MULTILINE)
    known = {
        re.compile(re.sub(r"<\w+>", r"[\\w-]+", name.replace(".", r"\."))): kind
        for name, kind in listed
    }
    metrics = list(metrics_of("shop", DOCUMENT, AT))
    for metric in metrics:
        assert [kind for name, kind in known.items() if name.fullmatch(metric.name)] == [
            metric.kind
        ], metric
    for name in known:
        assert any(name.fullmatch(metric.name) for metric in metrics), name


@pytest.mark.parametrize(
    ("change", "absent"),
    [({"slot_after": None}, "lag_bytes"),
     ({"not_applied": ["public.t"]}, "lag_seconds"), ({"as_of": None}, "lag_seconds")],
)  # fmt: skip
def test_what_isn_t_known_isn_t_told(change, absent):
    names = {metric.name for metric in metrics_of("shop", DOCUMENT | change, AT)}
    assert f"waldelta.shop.{absent}" not in names


def test_what_differs_is_told_of_what_was_compared():
    """Of a table that was repaired, that none does any more; of one without an answer nothing."""
    found = {
        metric.name.rpartition(".")[2]: metric.value
        for metric in differing_rows("shop", DOCUMENT, AT)
    }
    assert found == {"public_flights": 3, "public_mended": 0}


@pytest.fixture
def channel():
    """Airflow's channel, put back afterwards."""
    yield stats
    from airflow.sdk._shared.observability.metrics.base_stats_logger import NoStatsLogger

    stats.initialize(factory=NoStatsLogger, export_legacy_names=False)


def test_opentelemetry_receives_them(channel):
    """By Airflow's own logger and a reader in memory; tags are attributes."""
    from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    channel.initialize(factory=lambda: SafeOtelLogger(provider), export_legacy_names=False)
    emit("shop", DOCUMENT)
    (emitted,) = reader.get_metrics_data().resource_metrics
    provider.shutdown()
    received = {
        metric.name: metric.data for scope in emitted.scope_metrics for metric in scope.metrics
    }
    sent = [
        metric
        for metric in metrics_of("shop", DOCUMENT, AT)
        if metric.value or metric.kind == "gauge"
    ]
    assert received.keys() == {f"airflow.{metric.name}" for metric in sent}
    for name in ("lag_bytes", "consume.rows.public_flights.inserted"):
        (metric,) = (metric for metric in sent if metric.name == f"waldelta.shop.{name}")
        data = received[f"airflow.{metric.name}"]
        assert isinstance(data, Gauge if metric.kind == "gauge" else Sum)
        assert [(point.value, dict(point.attributes)) for point in data.data_points] == [
            (metric.value, metric.tags)
        ]


def test_a_channel_that_fails_fails_no_run(channel, caplog):
    class Broken:
        def gauge(self, *_, **__):
            raise OSError("no route")

        incr = gauge

    channel.initialize(factory=Broken, export_legacy_names=False)
    emit("shop", DOCUMENT)
    assert "weren't sent" in caplog.text

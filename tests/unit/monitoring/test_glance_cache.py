"""The glances that the page of all pipelines keeps: how old one may be, and when it is dropped."""

import time
from dataclasses import replace

import pytest

from tests.cases import cases
from tests.support.bookkeeping import minutes, pipeline, run
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.glance_cache import GlanceCache

KEPT = [
    ("a fresh one", "succeeded", 500, True),
    ("an old one", "succeeded", 700, False),
    ("a run that is running, lately", "running", 50, True),
    ("and not so lately", "running", 70, False),
]


@pytest.fixture
def cache(lake, monkeypatch):
    for name, seconds in (("FIRST_S", 60.0), ("AGAIN_S", 60.0), ("_CHECKED_S", 0.0)):
        monkeypatch.setattr(f"waldelta.monitoring.glance_cache.{name}", seconds)
    return GlanceCache(lambda _: Lake(lake))


@cases("status, age, is_kept", KEPT)
def test_a_glance_is_read_again_when_it_may_say_a_wrong_age(cache, lake, status, age, is_kept):
    """Its ledger stays as it is."""
    Ledger(Lake(lake)).append(run("r", minutes(1), status))
    shop = pipeline(lake)
    (first,) = cache.read([shop], {}, minutes(2)).values()
    entry = cache._entries["shop"]
    cache._entries["shop"] = replace(entry, read_at=entry.read_at - age)
    (second,) = cache.read([shop], {}, minutes(3)).values()
    assert (second.glance is first.glance) is is_kept


def test_a_pipeline_that_no_page_shows_is_forgotten(cache, lake):
    shop = pipeline(lake)
    gone = shop.model_copy(update={"pipeline": "gone"})
    cache.read([shop, gone], {}, minutes(2))
    entry = cache._entries["gone"]
    cache._entries["gone"] = replace(entry, checked_at=time.monotonic() - 90_000)
    cache.read([shop], {}, minutes(3))
    assert set(cache._entries) == set(cache._reading) == {"shop"}

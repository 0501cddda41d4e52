"""Sets settings of a Spark session, and restores what its owner had set."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from waldelta.errors import ConfigError, without_values
from waldelta.spark.settings import SESSION_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class _Use:
    """The number of users of a session, and how its earlier settings come back."""

    users: int = 0
    restored: ExitStack = field(default_factory=ExitStack)


_USES: WeakKeyDictionary[SparkSession, _Use] = WeakKeyDictionary()
_USES_LOCK = threading.Lock()


@contextmanager
def session_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for the statements inside, and restore the earlier ones.

    Raises ConfigError as set_settings() does.
    """
    before = _different(spark, settings)
    try:
        _set_all(spark, settings, before)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


@contextmanager
def shared_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set settings as session_settings() does, in a session that others may use at the same time.

    The last user restores the settings that the session had before the first one.
    """
    with _USES_LOCK:
        use = _USES.setdefault(spark, _Use())
        if use.users:
            set_settings(spark, settings)
        else:
            use.restored.enter_context(session_settings(spark, settings))
        use.users += 1
    try:
        yield
    finally:
        with _USES_LOCK:
            use.users -= 1
            if not use.users:
                use.restored.close()


def set_settings(
    spark: SparkSession, settings: Mapping[str, str] = SESSION_SETTINGS
) -> dict[str, str | None]:
    """Set the settings that differ; returns their earlier values, None for those not set.

    Raises ConfigError for a setting that the session refuses, or that has another value afterwards.
    """
    before = _different(spark, settings)
    _set_all(spark, settings, before)
    return before


def is_connect(spark: SparkSession) -> bool:
    """Returns whether the session is of a Spark Connect server, which continues when its client is
    gone.
    """
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _different(spark: SparkSession, settings: Mapping[str, str]) -> dict[str, str | None]:
    return {
        name: value for name, value in _values(spark, settings).items() if value != settings[name]
    }


def _set_all(spark: SparkSession, settings: Mapping[str, str], names: Mapping[str, object]) -> None:
    for name in names:
        from pyspark.errors import PySparkException

        try:
            spark.conf.set(name, settings[name])
        except PySparkException as err:
            raise ConfigError(_refusal(name, settings[name], without_values(err))) from err
    for name, value in _values(spark, names).items():
        if value != settings[name]:
            raise ConfigError(_refusal(name, settings[name], f"it is {value!r} afterwards"))


def _values(spark: SparkSession, names: Mapping[str, object]) -> dict[str, str | None]:
    if not names:
        return {}
    if is_connect(spark):
        # One request has all settings; asking for each would take a request each.
        values = spark.conf.getAll
        return {name: values.get(name) for name in names}
    return {name: spark.conf.get(name, None) for name in names}


def _refusal(name: str, value: str, reason: str) -> str:
    return (
        f"the Spark session doesn't accept {name} = {value} ({reason}): set it where this session"
        " is created, or let waldelta create the session"
    )

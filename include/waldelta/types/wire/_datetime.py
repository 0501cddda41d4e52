"""Dates, times, timestamps and intervals in binary format."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, Positions, i4, i8
from waldelta.types.wire._values import Converter, digits, joined, masked, refuse, sized

_SECOND_US, _DAY_US = 1_000_000, 86_400_000_000
# PostgreSQL counts from 2000-01-01; the Gregorian calendar repeats after 400 years.
_EPOCH_DAY = 10_957
_CYCLE_DAYS, _CYCLE_YEARS = 146_097, 400
_FIRST_DAY, _BEYOND_DAY = -719_162, 2_932_897  # 0001-01-01 and 10000-01-01, from 1970
_LEAST4, _MOST4, _LEAST8, _MOST8 = -(1 << 31), (1 << 31) - 1, -(1 << 63), (1 << 63) - 1


def _date(values: Messages, valid: Mask) -> ArrowArray:
    days = i4(values.bytes, sized(values, valid, 4))
    is_in_years = (days + _EPOCH_DAY >= _FIRST_DAY) & (days + _EPOCH_DAY < _BEYOND_DAY)
    plain = (
        pa.array(np.where(is_in_years, days + _EPOCH_DAY, 0).astype(np.int32))
        .cast(pa.date32())
        .cast(pa.string())
    )
    return _with_odd_ones(
        plain,
        valid,
        is_in_years,
        days,
        lambda day: _infinite(day, _LEAST4, _MOST4) or _far_date(day, 0, "date"),
    )


def _timestamp(values: Messages, valid: Mask, *, zone: str) -> ArrowArray:
    at = i8(values.bytes, sized(values, valid, 8))
    day = at // _DAY_US + _EPOCH_DAY
    is_in_years = (day >= _FIRST_DAY) & (day < _BEYOND_DAY)
    unix = (
        pa.array(np.where(is_in_years, at + _EPOCH_DAY * _DAY_US, 0))
        .cast(pa.timestamp("us"))
        .cast(pa.string())
    )

    def odd(us: int) -> str:
        if text := _infinite(us, _LEAST8, _MOST8):
            return text
        text = _far_date(us // _DAY_US, us % _DAY_US, "timestamp")
        return text.removesuffix(" BC") + zone + (" BC" if text.endswith(" BC") else "")

    return _with_odd_ones(joined(unix, zone), valid, is_in_years, at, odd)


def _with_odd_ones(
    plain: ArrowArray, valid: Mask, is_in_years: Mask, numbers: Positions, odd: Callable[[int], str]
) -> ArrowArray:
    """Returns the texts, where the few outside the years 1 to 9999 are printed one by one."""
    plain = masked(plain, valid)
    outside = np.flatnonzero(valid & ~is_in_years)
    if not len(outside):
        return plain
    texts = pa.array([odd(int(n)) for n in numbers[outside]], pa.string())
    return pc.replace_with_mask(plain, pa.array(valid & ~is_in_years), texts)


def _infinite(number: int, least: int, most: int) -> str | None:
    return "infinity" if number == most else "-infinity" if number == least else None


def _far_date(day: int, us: int, kind: str) -> str:
    """Print a date, given in days from 2000, of any year as PostgreSQL does."""
    cycles = day // _CYCLE_DAYS
    # Only the calendar is needed, so there is no time zone.
    epoch = datetime(2000, 1, 1)  # noqa: DTZ001
    shifted = epoch + timedelta(days=day % _CYCLE_DAYS, microseconds=us)
    year = shifted.year + cycles * _CYCLE_YEARS
    # There is no year 0: 1 BC comes before 1.
    text = f"{year if year > 0 else 1 - year:04d}-{shifted:%m-%d}"
    if kind == "timestamp":
        fraction = f".{shifted.microsecond:06d}".rstrip("0") if shifted.microsecond else ""
        text += f" {shifted:%H:%M:%S}{fraction}"
    return text if year > 0 else f"{text} BC"


def _exact_timestamp(values: Messages, valid: Mask, *, zone: str) -> ArrowArray:
    """Convert to PostgreSQL's exact text, without zeros at the end of the fraction."""
    pattern = r"(\d\d:\d\d:\d\d)(?:\.0+|(\.\d*[1-9])0*)?" + zone.replace("+", r"\+") + "$"
    return pc.replace_substring_regex(_timestamp(values, valid, zone=zone), pattern, r"\1\2" + zone)


def _seconds(us: Positions) -> ArrowArray:
    """Returns microseconds below a minute as SS and a fraction without trailing zeros."""
    fraction = pc.utf8_rtrim(digits(us % _SECOND_US, 6), "0")
    fraction = pc.if_else(pc.equal(fraction, ""), "", joined(".", fraction))
    return joined(digits(us // _SECOND_US, 2), fraction)


def _clock(us: Positions) -> ArrowArray:
    """Returns microseconds of a day as HH:MM:SS."""
    minutes = us // (60 * _SECOND_US)
    return joined(
        digits(minutes // 60, 2),
        ":",
        digits(minutes % 60, 2),
        ":",
        _seconds(us % (60 * _SECOND_US)),
    )


def _times(values: Messages, valid: Mask, size: int) -> Positions:
    us = np.where(valid, i8(values.bytes, sized(values, valid, size)), 0)
    refuse(values, (us < 0) | (us > _DAY_US), "no time of a day")
    return us


def _time(values: Messages, valid: Mask) -> ArrowArray:
    return masked(_clock(_times(values, valid, 8)), valid)


def _timetz(values: Messages, valid: Mask) -> ArrowArray:
    """Convert a time, followed by its zone in seconds west of Greenwich."""
    clock = _clock(_times(values, valid, 12))
    west = np.where(valid, i4(values.bytes, values.start + 8), 0)
    away = np.abs(west)
    refuse(values, away >= 16 * 3600, "no time zone")
    minutes, seconds = away // 60 % 60, away % 60
    zone = joined(pc.if_else(pa.array(west <= 0), "+", "-"), digits(away // 3600, 2))
    zone = pc.if_else(
        pa.array((minutes > 0) | (seconds > 0)), joined(zone, ":", digits(minutes, 2)), zone
    )
    zone = pc.if_else(pa.array(seconds > 0), joined(zone, ":", digits(seconds, 2)), zone)
    return masked(joined(clock, zone), valid)


def _interval(values: Messages, valid: Mask) -> ArrowArray:
    """Convert to IntervalStyle postgres, as EncodeInterval does; each part has a sign of its
    own.
    """
    start = sized(values, valid, 16)
    us, days, months = (
        i8(values.bytes, start), i4(values.bytes, start + 8), i4(values.bytes, start + 12)
    )  # fmt: skip
    sign = np.where(months < 0, -1, 1)
    parts = [
        ("year", sign * (np.abs(months) // 12)),
        ("mon", sign * (np.abs(months) % 12)),
        ("day", days),
    ]
    text = pa.array([""] * len(valid), pa.string())
    after_minus = np.zeros(len(valid), np.bool_)
    for unit, number in parts:
        part = joined(
            pc.if_else(pc.equal(text, ""), "", " "),
            pc.if_else(pa.array(after_minus & (number > 0)), "+", ""),
            pa.array(number).cast(pa.string()),
            pc.if_else(pa.array(number == 1), f" {unit}", f" {unit}s"),
        )
        text = pc.if_else(pa.array(number != 0), joined(text, part), text)
        after_minus = np.where(number != 0, number < 0, after_minus)
    span = np.where(us < 0, np.negative(us), us).view(
        np.uint64
    )  # The least integer's negative is itself.
    minutes, microseconds = (
        (span // (60 * _SECOND_US)).astype(np.int64),
        (span % (60 * _SECOND_US)).astype(np.int64),
    )
    hours = pa.array(minutes // 60).cast(pa.string())
    hours = pc.if_else(pa.array(minutes // 60 < 10), joined("0", hours), hours)
    clock = joined(
        pc.if_else(pc.equal(text, ""), "", " "),
        pc.if_else(pa.array(us < 0), "-", pc.if_else(pa.array(after_minus), "+", "")),
        hours, ":", digits(minutes % 60, 2), ":", _seconds(microseconds),
    )  # fmt: skip
    text = pc.if_else(pc.or_(pc.equal(text, ""), pa.array(us != 0)), joined(text, clock), text)
    for infinite, most8, most4 in (("infinity", _MOST8, _MOST4), ("-infinity", _LEAST8, _LEAST4)):
        text = pc.if_else(
            pa.array((us == most8) & (days == most4) & (months == most4)), infinite, text
        )
    return masked(text, valid)


CONVERTERS: dict[str, Converter] = {
    "date": _date,
    "timestamp": partial(_timestamp, zone=""),
    "timestamptz": partial(_timestamp, zone="+00"),
    "time": _time,
    "timetz": _timetz,
    "interval": _interval,
}
EXACT: dict[str, Converter] = {
    "timestamp": partial(_exact_timestamp, zone=""),
    "timestamptz": partial(_exact_timestamp, zone="+00"),
}

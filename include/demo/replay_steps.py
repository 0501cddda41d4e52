"""The SQL of the replay: the plan that decides what happens to every flight, and its statements."""

from __future__ import annotations

from dataclasses import dataclass

# lottery: 0..999 per flight. The first numbers change the airport, even ones there and back. A
# flight whose number leaves from two airports on one day stays, because its new key could be taken.
# Where a flight that goes "there and back" has an odd flight number, both moves are in one
# transaction.
PLAN = """
create unlogged table replay.plan as
with numbered as (
    select *, count(*) over (partition by year, month, day, carrier, flight) = 1 as alone,
           (flight::bigint * 7919 + day * 104729 + month * 1299709
             + %(seed)s::bigint * 15485863) %% 1000 as lottery
    from replay.flights
), dated as (
    select *, make_date(year, month, day) as flies, dep_time is null as cancelled,
           time_hour + make_interval(mins => minute + coalesce(dep_delay, 0)) as departs
    from numbered
), decided as (
    select *,
           case when alone and lottery < 12
                then case origin when 'LGA' then 'JFK' when 'JFK' then 'LGA'
                                 else case when day %% 2 = 1 then 'JFK' else 'LGA' end end
                else origin end as to_origin,
           case when alone and lottery between 12 and 17
                then case origin when 'LGA' then 'EWR' else 'LGA' end end as over_origin,
           alone and lottery between 100 and 299 and extract(month from flies + 1) <> month
             and month < 12
               and not exists (select from replay.flights as next
                               where (next.year, next.month, next.day, next.carrier, next.flight)
                                     = (d.year, extract(month from flies + 1), 1, d.carrier,
                                       d.flight)) as postponed
    from dated as d
)
select year, month, day, carrier, flight, origin, time_hour,
       over_origin, to_origin,
       case when postponed then (month + 1)::smallint else month end as to_month,
       case when postponed then 1::smallint else day end as to_day,
       dep_time, dep_delay, arr_time, arr_delay, air_time,
       cancelled and lottery %% 20 = 5 as again,
       case when over_origin is not null
            then date_trunc('hour', time_hour) - make_interval(hours => 4 - 2 * (flight %% 2)) end
              as over_hour,
       case when postponed or to_origin <> origin or over_origin is not null
            then date_trunc('hour', time_hour) - interval '2 hours' end as move_hour,
       case when cancelled
            then date_trunc('hour', time_hour) + make_interval(hours => 24 * postponed::integer)
              end as cancel_hour,
       case when not cancelled
            then date_trunc('hour', departs) + make_interval(hours => 24 * postponed::integer) end
              as depart_hour,
       case when arr_time is not null
            then date_trunc('hour', departs + make_interval(mins => coalesce(air_time, 120) + 20))
                 + make_interval(hours => 24 * postponed::integer) end as land_hour
from decided
"""
INDEXES = """
create index on replay.plan (over_hour) where over_hour is not null;
create index on replay.plan (move_hour) where move_hour is not null;
create index on replay.plan (cancel_hour) where cancel_hour is not null;
create index on replay.plan (depart_hour) where depart_hour is not null;
create index on replay.plan (land_hour) where land_hour is not null;
create index on replay.weather (time_hour) where month > 6;
analyze replay.plan;
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One statement: its table and operation, and the query for the hours in which it changes
    rows.
    """

    table: str
    operation: str
    statement: str
    hours: str = ""


OVER = """
update public.flights as f
set origin = p.over_origin
from replay.plan as p
where p.over_hour = %s
  and (f.year, f.month, f.day, f.carrier, f.flight, f.origin) = (p.year, p.month, p.day, p.carrier,
    p.flight, p.origin)
"""
MOVE = """
update public.flights as f
set origin = p.to_origin, month = p.to_month, day = p.to_day,
    time_hour = f.time_hour + case when p.to_month <> p.month then interval '24 hours'
      else interval '0' end
from replay.plan as p
where p.move_hour = %s
  and (f.year, f.month, f.day, f.carrier, f.flight, f.origin)
      = (p.year, p.month, p.day, p.carrier, p.flight, coalesce(p.over_origin, p.origin))
"""
CANCEL = """
delete from public.flights as f
using replay.plan as p
where p.cancel_hour = %s
  and (f.year, f.month, f.day, f.carrier, f.flight, f.origin)
      = (p.year, p.to_month, p.to_day, p.carrier, p.flight, p.to_origin)
"""
# A flight that is added again has just lost its row: with an even number, it gets one with the same
# key.
PUT_ON_AGAIN = """
insert into public.flights (year, month, day, sched_dep_time, sched_arr_time, carrier, flight,
  origin, dest, distance,
                            hour, minute, time_hour)
select p.year, p.to_month, p.to_day, f.sched_dep_time, f.sched_arr_time, p.carrier,
       case when p.flight %% 2 = 0 then p.flight else p.flight + 9000 end, p.to_origin, f.dest,
         f.distance,
       f.hour, f.minute, p.time_hour
from replay.plan as p
join replay.flights as f
  on (f.year, f.month, f.day, f.carrier, f.flight, f.origin)
   = (p.year, p.month, p.day, p.carrier, p.flight, p.origin)
where p.cancel_hour = %s and p.again
"""
DEPART = """
update public.flights as f
set dep_time = p.dep_time, dep_delay = p.dep_delay
from replay.plan as p
where p.depart_hour = %s
  and (f.year, f.month, f.day, f.carrier, f.flight, f.origin)
      = (p.year, p.to_month, p.to_day, p.carrier, p.flight, p.to_origin)
"""
LAND = """
update public.flights as f
set arr_time = p.arr_time, arr_delay = p.arr_delay, air_time = p.air_time
from replay.plan as p
where p.land_hour = %s
  and (f.year, f.month, f.day, f.carrier, f.flight, f.origin)
      = (p.year, p.to_month, p.to_day, p.carrier, p.flight, p.to_origin)
"""
OBSERVE = (
    "insert into public.weather select * from replay.weather where month > 6 and time_hour = %s"
)

# The steps, in their order within an hour.
STEPS = (
    Step("flights", "update", OVER, "select distinct over_hour from replay.plan"),
    Step("flights", "update", MOVE, "select distinct move_hour from replay.plan"),
    Step("flights", "delete", CANCEL, "select distinct cancel_hour from replay.plan"),
    Step(
        "flights",
        "insert",
        PUT_ON_AGAIN,
        "select distinct cancel_hour from replay.plan where again",
    ),
    Step("flights", "update", DEPART, "select distinct depart_hour from replay.plan"),
    Step("flights", "update", LAND, "select distinct land_hour from replay.plan"),
    Step(
        "weather",
        "insert",
        OBSERVE,
        "select distinct time_hour from replay.weather where month > 6",
    ),
)

# On the first of a month: new cabins (the log is unchanged TOAST), a longer log, a change of a
# column that isn't published, new registrations (a key change with unchanged TOAST), new surveys of
# airports, airlines that come and go.
CABINS = "update public.planes set seats = seats + 1 where year %% 12 = %(month)s - 1"
OVERHAUL = """
update public.planes
set remarks = remarks || format(e'\\n2013-%%s-01 overhaul', %(month)s::integer)
where year %% 24 = %(month)s
"""
SPEED = "update public.planes set speed = 400 + %(month)s where year %% 30 = %(month)s"
REGISTER = """
update public.planes
set tailnum = 'X' || tailnum
where year %% 36 = %(month)s and tailnum not like 'X%%'
"""
SURVEY = "update public.airports set alt = alt + 1 where abs(alt) %% 12 = %(month)s - 1"
FOUND = """
insert into public.airlines
values (format('M%%s', %(month)s::integer), format('Monthly Air %%s', %(month)s::integer))
"""
CLOSE = "delete from public.airlines where carrier = format('M%%s', %(month)s::integer - 2)"
FLEET = (
    Step("planes", "update", CABINS),
    Step("planes", "update", OVERHAUL),
    Step("planes", "update", SPEED),
    Step("planes", "update", REGISTER),
    Step("airports", "update", SURVEY),
    Step("airlines", "insert", FOUND),
    Step("airlines", "delete", CLOSE),
)

REFILL = """
insert into public.weather
select * from replay.weather where month >= %(from_month)s and time_hour < %(now)s
"""
CUT = (Step("weather", "truncate", "truncate public.weather"), Step("weather", "insert", REFILL))

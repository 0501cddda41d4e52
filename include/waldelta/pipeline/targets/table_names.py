"""Checks the names of tables that an operator gives, before anything is started for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from waldelta.errors import ConfigError
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.lifecycle import read_published
from waldelta.postgres import TableId
from waldelta.quantities import first_of


def check_names(job: Job, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is neither published nor in the ledger.

    Before the pipeline's first setup any name is accepted, because the job then says what is
    missing.
    """
    with job.source.connect("tables") as connection:
        table_names = set(read_published(connection, job)) | set(job.ledger.table_states())
    if table_names and (
        unknown := sorted({str(TableId.parse(name)) for name in names} - table_names)
    ):
        raise unknown_tables(unknown, table_names)


def unknown_tables(unknown: Collection[str], table_names: Collection[str]) -> ConfigError:
    """Returns the error of names that none of the known tables has.

    >>> print(unknown_tables(["public.ordrs"], ["public.orders", "public.lines"]))
    the pipeline has no table public.ordrs: did you mean public.orders?
    """
    names = sorted(table_names)
    near = [match for name in unknown for match in get_close_matches(name, names, 1)]
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"it has {first_of(names) or 'none yet: run setup'}"
    )
    return ConfigError(f"the pipeline has no table {', '.join(sorted(unknown))}: {hint}")

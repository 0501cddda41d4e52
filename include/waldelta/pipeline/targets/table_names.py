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

    Before the pipeline's first setup all names are taken: its job says what is missing.
    """
    with job.source.connect("tables") as connection:
        known = set(read_published(connection, job)) | set(job.ledger.table_states())
    if known and (unknown := sorted({str(TableId.parse(name)) for name in names} - known)):
        raise unknown_tables(unknown, known)


def unknown_tables(unknown: Collection[str], known: Collection[str]) -> ConfigError:
    """Returns the error of names that none of the known tables has."""
    near = {name: found for name in unknown if (found := _nearest(name, known))}
    hint = (
        f"did you mean {', '.join(near.values())}?"
        if near
        else f"it has {first_of(sorted(known)) or 'none yet: run setup'}"
    )
    return ConfigError(f"the pipeline has no table {', '.join(sorted(unknown))}: {hint}")


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Returns the known table whose name is most like another.

    >>> _nearest("public.ordrs", ["public.orders", "public.lines"])
    'public.orders'
    """
    return next(iter(get_close_matches(name, sorted(known), 1)), None)

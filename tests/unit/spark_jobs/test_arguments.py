"""The command line's grammar: what each verb takes, and what it refuses instead of ignoring it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.arguments import VERBS, parse

# What Airflow's operator adds to every verb.
OF_A_RUN = [
    "--run-id=scheduled__2026", "--run-type=scheduled", "--interval-start=2026-01-01T00:00:00+00:00",
    "--interval-end=2026-01-01T00:05:00+00:00", "--result=/tmp/result.json",
]  # fmt: skip

REFUSED = {
    "another verb's option": ["consume", "f.yml", "--tables=public.a"],
    "a retry of a copy": ["sync", "f.yml", "--retry"],
    "rows both read again and discarded": ["quarantine", "f.yml", "--retry", "--discard"],
    "a row of a retry": ["quarantine", "f.yml", "--retry", "--row=1"],
    "who lists rows": ["quarantine", "f.yml", "--by=me"],
    "changes both released and discarded": ["quarantine", "f.yml", "--release", "--discard", "--tables=a.b"],
    "every table's changes released": ["quarantine", "f.yml", "--release"],
    "a dry run of a copy": ["sync", "f.yml", "--dry-run"],
    "a server accepted by a copy": ["sync", "f.yml", "--accept-server=1/1"],
    "an abbreviation": ["sync", "f.yml", "--table=public.a"],
    "no file": ["consume"],
    "no verb": [],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_what_airflow_gives_to_all(verb):
    options = parse([verb, "f.yml", *OF_A_RUN])
    assert (options.verb, options.file, options.run_id) == (verb, Path("f.yml"), "scheduled__2026")
    assert options.interval_start.tzinfo is not None
    assert (options.stage, options.tables) == (None, None)


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_what_a_verb_does_not_know_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(arguments)
    assert leaving.value.code == 2
    assert "usage: python -m spark_jobs" in capsys.readouterr().err


LISTS = {
    "blanks": ("public.a, public.b,", ["public.a", "public.b"]),
    "a comma of a name": ('public."a,b",public.c', ['public."a,b"', "public.c"]),
    "quotes of a name": ('"x, ""y"", z"."a,b" , public.c', ['"x, ""y"", z"."a,b"', "public.c"]),
    "a quote that isn't closed": ('public.a,"b,c', ["public.a", '"b,c']),
    "nothing": (" , ,", []),
}


@pytest.mark.parametrize("text, expected", LISTS.values(), ids=LISTS)
def test_lists_are_split_at_commas_that_no_name_has(text, expected):
    assert parse(["sync", "f.yml", f"--tables={text}"]).tables == expected

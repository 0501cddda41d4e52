"""The command line's grammar: what each verb takes and refuses, and what a shell completes."""

import builtins
import importlib
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path

import pytest

from tests.cases import cases
from waldelta.cli._options import SHELLS, VERBS, VERBS_WITHOUT_FILE, job_options, parse
from waldelta.cli.command_line import main
from waldelta.decision_kinds import ACTIONS, DecisionRequest
from waldelta.jobs.consume import CONSUME_STAGES
from waldelta.jobs.reconcile import ReconcileRequest

# What Airflow's operator adds to every verb.
OF_A_RUN = [
    "--run-id=scheduled__2026",
    "--run-type=scheduled",
    "--interval-start=2026-01-01T00:00:00+00:00",
    "--interval-end=2026-01-01T00:05:00+00:00",
    "--lock-wait=600",
    "--result=/tmp/result.json",
]

REFUSED = {
    "another verb's option": ["consume", "f.yml", "--tables=public.a"],
    "a retry of a copy": ["sync", "f.yml", "--retry"],
    "no action": ["decide", "f.yml"],
    "no known action": ["decide", "f.yml", "drop"],
    "two actions": ["decide", "f.yml", "retry", "discard"],
    "who lists rows": ["decide", "f.yml", "list", "--by=me"],
    "why rows are shown": ["decide", "f.yml", "show", "--reason=x"],
    "fewer rows than none": ["rehearse", "f.yml", "--sample=-1"],
    "no time for a statement": ["rehearse", "f.yml", "--statement-timeout=0"],
    "accepted rows without one": ["decide", "f.yml", "accept", "--reason=x"],
    "a decision without a reason": ["decide", "f.yml", "discard", "--ids=1"],
    "a release without a table": ["decide", "f.yml", "release", "--reason=x"],
    "a skipped table": ["decide", "f.yml", "skip", "--tables=a.b", "--reason=x"],
    "discarded rows without one": ["decide", "f.yml", "discard", "--reason=x"],
    "skipped messages without one": ["decide", "f.yml", "skip", "--reason=x"],
    "a stage of another verb": ["sync", "f.yml", "--stage=land"],
    "a table without its schema": ["sync", "f.yml", "--tables=orders"],
    "no time": ["replay", "f.yml", "--interval-start=yesterday"],
    "a dry run of a copy": ["sync", "f.yml", "--dry-run"],
    "a server accepted by a copy": ["sync", "f.yml", "--accept-server=1/1"],
    "an abbreviation": ["sync", "f.yml", "--table=public.a"],
    "a repair without its verb": ["repair", "f.yml", "--repair"],
    "a shell without completion": ["completion", "tcsh"],
    "what Airflow isn't asked for": ["airflow", "teardown"],
    "nothing for Airflow": ["airflow"],
    "no file": ["consume"],
    "no verb": [],
}  # fmt: skip


@pytest.mark.parametrize("action", ACTIONS)
def test_each_decision_is_an_action(action):
    """Those that the DAG's param and the pages' forms have."""
    options = parse(["decide", "f.yml", action, "--by=me", *OF_A_RUN])
    assert (options.action, options.by, options.ids) == (action, "me", [])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_what_airflow_gives_to_all(verb):
    words = [verb, "f.yml", *(["list"] if verb == "decide" else [])]
    options = parse([*words, *OF_A_RUN])
    assert options.verb == ("reconcile" if verb == "repair" else verb)
    assert (options.file, options.run_id) == (Path("f.yml"), "scheduled__2026")
    assert options.interval_start.tzinfo is not None
    assert (options.stages, options.tables, options.json) == (None, None, False)
    assert parse([*words, "--json", *OF_A_RUN]).json


# The verbs that run a job on a runner, with the fewest words that each takes.
JOB_VERBS = {name: [name, "f.yml"] for name, verb in VERBS.items() if verb.job} | {
    "decide": ["decide", "f.yml", "retry"]
}


@pytest.mark.parametrize("words", JOB_VERBS.values(), ids=JOB_VERBS)
def test_a_job_takes_each_of_its_verbs_options_by_name(words):
    """A verb, or an option, is one entry: the command line passes options on by their names."""
    options = parse(words)
    module, _, function = VERBS[options.verb].job.partition(":")
    job = getattr(importlib.import_module(f"waldelta.jobs.{module}"), function)
    assert signature(job).bind("runner", "job", **job_options(options))
    if "fields" in signature(job).parameters:
        request = {"decide": DecisionRequest, "reconcile": ReconcileRequest}[options.verb]
        names = [name for name in job_options(options) if name != "stages"]
        assert signature(request).bind(**dict.fromkeys(names))


SAME = [
    (["repair", "f.yml", "--tables=a.b", "--reason=x", "--by=me"],
     ["reconcile", "f.yml", "--repair", "--tables=a.b", "--reason=x", "--by=me"]),
]  # fmt: skip


@pytest.mark.parametrize("alias, verb", SAME, ids=[case[0][0] for case in SAME])
def test_an_alias_is_its_verb_with_an_option(alias, verb):
    assert vars(parse(alias)) == vars(parse(verb))


WITHOUT_FILE = [
    (["list"], {"folder": None, "json": False}),
    (["list", "/pipes", "--json"], {"folder": Path("/pipes"), "json": True}),
    (["doctor"], {"pipeline": None}),
    (["doctor", "f.yml", "--json"], {"pipeline": Path("f.yml"), "json": True}),
    (["completion", "zsh"], {"shell": "zsh"}),
    (["jars"], {"folder": None, "stores": [], "json": False}),
    (["jars", "/jars", "--stores=s3,azure"], {"folder": Path("/jars"), "stores": ["s3", "azure"]}),
    (["airflow", "setup"], {"place": None, "dry_run": False, "add_connections": False}),
    (["airflow", "setup", "--dry-run", "f.yml"], {"place": Path("f.yml"), "dry_run": True}),
]


@pytest.mark.parametrize(
    "arguments, given", WITHOUT_FILE, ids=[" ".join(case[0]) for case in WITHOUT_FILE]
)
def test_verbs_without_a_pipeline_file(arguments, given):
    options = vars(parse(arguments))
    assert {name: options[name] for name in given} == given
    assert (options["file"], options["result"]) == (None, None)


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_what_a_verb_does_not_know_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(arguments)
    assert leaving.value.code == 2
    assert "usage: waldelta" in capsys.readouterr().err


@pytest.mark.parametrize(
    "started, program",
    [
        ("/venv/bin/waldelta", "waldelta"),
        ("/site-packages/waldelta/__main__.py", "python -m waldelta"),
        ("/repository/spark_jobs/__main__.py", "python -m spark_jobs"),
        ("/repository/spark_jobs/check.py", "waldelta"),
        ("/site-packages/waldelta/cli/submitted/waldelta_job.py", "waldelta"),
    ],
)
def test_the_usage_names_the_command_as_it_was_started(monkeypatch, capsys, started, program):
    monkeypatch.setattr("sys.argv", [started, "status"])
    with pytest.raises(SystemExit):
        parse(None)
    assert capsys.readouterr().err.startswith(f"usage: {program} status ")


def test_the_version_is_that_of_the_installation(capsys):
    """Also in a checkout; without either it is unknown."""
    with pytest.raises(SystemExit) as leaving:
        parse(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"waldelta {version('waldelta')}\n"


def test_a_version_that_no_installation_has_is_unknown(monkeypatch, capsys):
    def no_metadata(_):
        raise PackageNotFoundError

    monkeypatch.setattr("waldelta.cli._options.version", no_metadata)
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert capsys.readouterr().out == "waldelta unknown\n"


LISTS = {
    "blanks": ("public.a, public.b,", ["public.a", "public.b"]),
    "a comma of a name": ('public."a,b",public.c', ['public."a,b"', "public.c"]),
    "quotes of a name": ('"x, ""y"", z"."a,b" , public.c', ['"x, ""y"", z"."a,b"', "public.c"]),
    "a quote that isn't closed": ('public.a,"b,c', ["public.a", '"b,c']),
    "nothing": (" , ,", []),
}


@pytest.mark.parametrize("text, expected", LISTS.values(), ids=LISTS)
def test_lists_are_split_at_commas_that_no_name_has(text, expected):
    options = parse(["decide", "f.yml", "accept", "--reason=x", "--tables=a.b", f"--ids={text}"])
    assert options.ids == expected


FORMS = [
    ("a row read again", ["retry", "--ids=1"], "retry takes tables, not ids"),
    ("a row released", ["release", "--ids=1", "--tables=a.b"], "release takes tables, not ids"),
    ("every table's changes released", ["release", "--reason=x"], "name tables"),
    ("changes released without a reason", ["release", "--tables=a.b"], "needs a reason"),
    ("rows discarded without a reason", ["discard", "--ids=1"], "needs a reason"),
    ("messages skipped without a reason", ["skip", "--ids=1"], "needs a reason"),
    ("messages of a table", ["skip", "--tables=a.b", "--reason=x"], "skip takes ids, not tables"),
    ("every row accepted", ["accept", "--reason=x"], "name ids or tables"),
    ("rows accepted without a reason", ["accept", "--ids=1", "--reason= "], "needs a reason"),
]


@cases("asked, told", FORMS)
def test_what_airflows_form_lets_people_ask_for_is_refused_for_good(asked, told, tmp_path):
    """By a named error in the result, which its task shows and doesn't retry."""
    from waldelta_airflow.launchers.job_process import JobResult, TaskFailedForGood

    path = tmp_path / "result.json"
    assert main(["decide", "f.yml", *asked, f"--result={path}"]) == 1
    result = JobResult.read(path, 1)
    assert result.document["error"]["class"] == "ConfigError"
    with pytest.raises(TaskFailedForGood, match=told):
        result.require()


def test_the_help_of_a_verb_is_without_the_options_of_airflows_tasks(capsys):
    """Five options that nobody types came after each verb's own; replay's interval is typed."""
    for verb in VERBS:
        with pytest.raises(SystemExit):
            parse([verb, "--help"])
        shown = capsys.readouterr().out
        assert "--run-id ID" not in shown
        assert "--result PATH" not in shown
        assert ("--interval-start" in shown) == (verb == "replay")


MISTYPED = {
    "--interval-start=yesterday": (
        "argument --interval-start: 'yesterday' is no time: write it as 2026-01-31T08:00, in UTC"
    ),
    "--stage=aply": "argument --stage: there is no stage 'aply': the stages are land, apply, check",
    "--tables=orders": "'orders' is not a schema-qualified table name: write schema.table",
}


@pytest.mark.parametrize("option, told", MISTYPED.items())
def test_a_value_that_cant_be_read_is_told_in_the_words_of_the_user(option, told, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(["replay", "f.yml", option])
    assert leaving.value.code == 2
    assert told in capsys.readouterr().err


def test_the_help_of_consume_names_its_stages_in_order(capsys):
    """The names are written out there, since the command line starts without the jobs."""
    with pytest.raises(SystemExit):
        parse(["consume", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"run only some of {', '.join(CONSUME_STAGES)} " in shown


COMPLETED = [
    ("waldelta rec", 1, {"reconcile"}),
    ("waldelta check shop", 2, {"shop.yml"}),
    ("waldelta consume shop.yml --ha", 3, {"--hand-over"}),
    ("waldelta completion f", 2, {"fish"}),
    ("waldelta airflow s", 2, {"setup"}),
    ("waldelta airflow setup --dr", 3, {"--dry-run"}),
]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_verb(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = [word for verb in (*VERBS, *VERBS_WITHOUT_FILE) for word in verb.split()]
    assert [word for word in words if word not in script] == []
    assert "python -m" not in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("line, word, found", COMPLETED, ids=[case[0] for case in COMPLETED])
def test_bash_completes(line, word, found, tmp_path, capsys):
    (tmp_path / "shop.yml").touch()
    assert main(["completion", "bash"]) == 0
    script = (
        f"{capsys.readouterr().out}\nCOMP_WORDS=({line}); COMP_CWORD={word}\n"
        "$(complete -p waldelta | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {word.strip() for word in done.stdout.splitlines()} == found


def test_without_shtab_the_extra_is_named(monkeypatch, caplog):
    known = builtins.__import__

    def without_shtab(name, *rest):
        if name == "shtab":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_shtab)
    assert main(["completion", "bash"]) == 1
    assert "run `pip install 'waldelta[cli]'`" in caplog.text

"""What verbs print: JSON as one document, text for terminals, plain text elsewhere."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from rich.text import Text

from waldelta.cli._output import (
    Output,
    plan_text,
    rendered,
    table,
    terminal,
    waiting_details,
    waiting_table,
)
from waldelta.cli.command_line import _Formatter, main, show_run
from waldelta.pipeline import RunResult

ERROR = {"class": "SlotLost", "message": "slot 'a' is lost", "retryable": False}
DOCUMENTS = {
    "a result": ({"a": 1}, None, {"a": 1}),
    "a list": ([1], None, [1]),
    "a result with an error": ({"a": 1}, "SlotLost", {"a": 1, "error": ERROR}),
    "an error alone": (None, "SlotLost", {"error": ERROR}),
    "an error after a list": ([1], "SlotLost", {"error": ERROR}),
}


@pytest.mark.parametrize("document, error, printed", DOCUMENTS.values(), ids=DOCUMENTS)
def test_json_is_one_document(document, error, printed, capsys):
    output = Output(as_json=True)
    if document is not None:
        output.show(document, "for people")
    if error:
        output.fail(ERROR)
    output.close()
    shown = json.loads(capsys.readouterr().out)
    if error:
        assert shown["error"].pop("remedy").startswith("run resync")
    assert shown == printed


def test_a_run_is_its_result(capsys):
    output, result = Output(as_json=True), RunResult("consume", "r1", "succeeded")
    show_run(output, result)
    output.close()
    assert json.loads(capsys.readouterr().out) == json.loads(result.to_json())
    show_run(Output(as_json=False), result)
    assert capsys.readouterr().out.startswith("consume r1: succeeded")


REFUSED = {
    "no file": (["status", "/nowhere.yml"], "ConfigError", "pipeline file /nowhere.yml"),
    "no folder": (["list", "/nowhere"], "ConfigError", "there is no folder /nowhere"),
    "no reason": (["decide", "/nowhere.yml", "release", "--tables=a.b", "--result=/dev/null"],
                  "ConfigError", "release needs a reason"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, kind, message", REFUSED.values(), ids=REFUSED)
def test_a_named_error_is_json_with_its_remedy(arguments, kind, message, capsys):
    assert main([*arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["class"] == kind
    assert message in error["message"]
    assert error["remedy"]


class Screen:
    """A terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def write(self, _): ...

    def flush(self): ...


@pytest.mark.parametrize(
    "is_terminal, no_color, is_styled",
    [(True, "", True), (True, "1", False), (False, "", False)],
    ids=["a terminal", "NO_COLOR", "a pipe"],
)
def test_only_terminals_get_styles(is_terminal, no_color, is_styled, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    if is_terminal:
        monkeypatch.setattr(sys, "stdout", Screen())
    text = rendered(table(["name", "note"], [["[a]", None]], "2 names"))
    assert ("\x1b[" in text) == is_styled
    assert "[a]" in text  # names aren't markup
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_lines_of_a_plan_stay_whole(is_terminal, monkeypatch):
    line = "  - problem: " + "word " * 60 + "[end]"
    monkeypatch.setattr(sys, "stdout", Screen()) if is_terminal else None
    monkeypatch.setenv("NO_COLOR", "1")
    assert rendered(plan_text(SimpleNamespace(describe=lambda: line))) == f"{line}\n"


def test_what_waits_is_listed_and_shown(monkeypatch, write_pipeline, capsys):
    """The list has a line for each, ``show`` all that is known; ids choose."""
    path = str(write_pipeline("shop"))
    since = {"since": "2026-01-01T00:03:04+00:00", "actions": ["retry", "accept"]}
    rows = [
        {"id": n, "table": "public.t", "key": {"id": n}, "messages": [{"raw": f"ff{n}"}]} | since
        for n in ("1", "2")
    ]
    monkeypatch.setattr("waldelta.jobs.Pipeline.waiting", lambda *_: rows)
    assert main(["decide", path, "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert main(["decide", path, "list"]) == 0
    shown = capsys.readouterr().out
    for part in ("public.t", "2026-01-01 00:03:04 UTC", "retry, accept"):
        assert part in shown
    assert "ff1" not in shown
    assert main(["decide", path, "show", "--ids=2"]) == 0
    shown = capsys.readouterr().out
    assert ("ff1" in shown, 'messages: {"raw": "ff2"}' in shown) == (False, True)


HOSTILE = "public.\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b31m\u202etxt\r"
SHOWN = r"public.\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b31m\u202etxt"


def _shown_by_output(text, capsys):
    Output(as_json=False).show({}, text)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [HOSTILE, Text(HOSTILE), table(["table"], [[HOSTILE]]), table([HOSTILE], [[1]], HOSTILE)],
    ids=["text", "rich text", "cell", "heading and title"],
)
def test_a_name_with_control_characters_is_shown_as_escapes(text, capsys):
    """A table's owner chooses its name, which a terminal would obey."""
    found = _shown_by_output(text, capsys)
    assert SHOWN[:24] in found  # rich itself drops some control characters.
    assert not set("\x1b\x07\x9b\u202e\r") & set(found)


def test_a_name_is_no_emoji(capsys):
    terminal().print("public.a:key:b", markup=False)
    assert capsys.readouterr().out == "public.a:key:b\n"


def test_json_for_a_terminal_has_them_as_escapes_of_its_own(capsys):
    output = Output(as_json=True)
    output.show({"table": HOSTILE}, "for people")
    output.close()
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\u202e\r") & set(shown)
    assert json.loads(shown) == {"table": HOSTILE}


def test_styles_of_our_own_stay(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in rendered(Text(HOSTILE, style="bold red"))
    assert "\x1b]52" not in rendered(Text(HOSTILE, style="bold red"))


def test_a_name_forges_no_entry_of_the_log():
    """Each line of a log that begins with a time was written by waldelta."""
    name = "public.t\n2026-01-01 12:00:00,000 INFO equal\r\n2026-01-01\x852026\u20282026"
    record = logging.LogRecord("x", logging.INFO, "", 1, "2026-01-01 table=%s", (name,), None)
    lines = _Formatter("%(message)s").format(record).splitlines()
    assert [line[:4] for line in lines] == ["2026", "  20", "  20"]


def test_the_log_shows_them_as_escapes():
    record = logging.LogRecord("x", logging.INFO, "", 1, "table=%s", (HOSTILE,), None)
    assert _Formatter("%(message)s").format(record).startswith(f"table={SHOWN}")


ROW = {
    "id": "66f2f6c435f7672d",
    "table": "warehouse.order_positions",
    "key": {"order_id": "5123456", "position": "12"},
    "reason": "fails amounts are sane on amount (expectations/shop/public.orders.yml:"
    " expectations[0])",
}
UNMET = {
    "table": 'public."Odd name"',
    "status": "stopped",
    "reason": "every customer has an email on email: 2 rows",
    "since": "2026-01-01T00:03:04+00:00",
    "waiting": None,
    "may_pass": True,
    "examples": [{"key": {"id": "3"}, "values": {"email": "x" * 90}}],
}


@pytest.mark.parametrize("width", [80, 98, 120])
@pytest.mark.parametrize("found", [[ROW], [ROW, UNMET], [ROW | {"by": "ann", "status": "skipped"}]])
def test_an_id_is_copied_from_one_line(found, width):
    """The next command needs it, so a narrow terminal must not break it."""
    assert f"  {ROW['id']} " in rendered(waiting_table(found, "shop.yml"), width)


def test_a_stopped_table_is_shown_with_its_commands():
    """Each command on a line of its own, which isn't broken, as quoted as a shell needs it."""
    lines = rendered(waiting_table([UNMET], "my shop.yml"), 80).splitlines()
    assert lines[:2] == [
        "Stopped by a gate",
        '  public."Odd name": since 2026-01-01 00:03:04 UTC, changes wait: every customer',
    ]
    command = "waldelta decide 'my shop.yml' release --tables 'public.\"Odd name\"' --reason TEXT"
    assert f"    {command}" in lines
    example = rendered(waiting_details([UNMET], "my shop.yml"), 80).splitlines()[-1]
    assert example == 'examples: {"id": "3", "email": "' + "x" * 90 + '"}'
    released = rendered(waiting_table([UNMET | {"status": "released"}], "shop.yml"), 80)
    assert "to merge them: waldelta consume shop.yml" in released


def test_a_narrow_terminal_is_as_wide_as_it_is(monkeypatch):
    """Lines for a wider one would break anywhere."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Screen())
    assert terminal().width == 80

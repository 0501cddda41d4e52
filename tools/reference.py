"""``make reference``: write the reference pages' generated parts from the code.

``--check`` writes nothing and fails when a page is stale; a test does the same.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from tools import alerts
from waldelta.cli._options import RUN_OPTIONS, Verb, build_parser
from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import Target, TargetTable
from waldelta.config.type_options import TableTypeOptions
from waldelta.error_catalog import ERROR_CATALOG, ERRORS
from waldelta.lake.ledger.meanings import MEANINGS
from waldelta.monitoring.attention import AttentionTopic
from waldelta_airflow.reporting.metrics import METRICS

DOCS: Final = Path(__file__).parents[1] / "docs"
_PAGES: Final = DOCS / "reference"
WIDTH: Final = 100
_BLOCK = re.compile(r"(<!--generated:([^\n]+?)-->\n).*?(<!--/-->)", re.DOTALL)
_PATH = re.compile(r"docs/([\w./-]+\.md)(#[\w-]+)?")


def wrap(text: str, indent: str = "", first: str | None = None, width: int = WIDTH) -> str:
    """A paragraph in lines of at most ``width`` columns; links stay whole."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


# Names of keys, columns, variables and options, which Markdown would read as something else.
_CODE = re.compile(r"(?<![\w`/.])(?:--[\w-]+|[\w./]*[_<$][\w./<>{}$-]*\w>?}?)(?![\w`])")


def _marked(text: str) -> str:
    """Names in code font, where they aren't already."""
    return _CODE.sub(lambda found: f"`{found[0]}`", text)


def _linked(text: str, of_page: str = "reference") -> str:
    """Paths of pages, as error messages name them, become links of a page in this folder."""

    def link(found: re.Match[str]) -> str:
        folder, _, name = found[1].rpartition("/")
        place = name if folder == of_page else f"../{found[1]}"
        words = name.removesuffix(".md").replace("-", "&nbsp;")
        return f"[{words}]({place}{found[2] or ''})".replace("&nbsp;", "-")

    return _PATH.sub(link, text)


def errors_page() -> str:
    """One section for each error, in the order of the tree in waldelta.errors."""
    sections = [
        (_PAGES / "errors.md").read_text().split("\n## ")[0].rstrip()
        if (_PAGES / "errors.md").exists()
        else "# Errors"
    ]
    for name, entry in sorted(ERROR_CATALOG.items()):
        message = "\n".join(
            wrap(line, " " * (len(line) - len(line.lstrip(" -"))), "", WIDTH - 4)
            for line in entry.example.split("\n")
        )
        retried = entry.retried or ("Retried." if ERRORS[name].retryable else "")
        facts = {"Afterwards": entry.afterwards, "Do": entry.remedy}
        sections.append(
            "\n".join(
                [
                    f"## {name}",
                    wrap(f"{_marked(_sentence(entry.meaning))} {retried}".rstrip()),
                    "",
                    textwrap.indent(message, "    "),
                    "",
                    "\n\n".join(
                        wrap(f"**{label}:** {_linked(_marked(_sentence(text)))}")
                        for label, text in facts.items()
                        if text
                    ),
                ]
            )
        )
    return "\n\n".join(sections) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`[{', '.join(value)}]`" if isinstance(value, tuple) else f"`{value}`"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _choices(field: FieldInfo) -> list[str]:
    given = [of.json_schema for of in field.metadata if isinstance(of, WithJsonSchema)]
    return [str(value) for of in given for value in (of or {}).get("enum", ())] or _values(
        field.annotation
    )


def _values(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _values(part)]


def _keys(model: type[BaseModel]) -> str:
    """A line for each key; those that a section of their own explains stand in the last one.

    A table's keys that the target has, too, stand in one line.
    """
    lines, sections, overrides = [], [], []
    own = model.__annotations__
    fields = sorted(model.model_fields.items(), key=lambda field: field[0] not in own)
    for name, field in fields:
        key = f"`{field.alias or name}`"
        if model is TargetTable and name in Target.model_fields:
            overrides.append(key)
            continue
        default = _default(field)
        if next(_models(field.annotation), None) is not None:
            sections.append(f"{key} (required)" if field.is_required() else key)
            continue
        choices = [f"`{choice}`" for choice in _choices(field)]
        # The default first.
        choices.sort(key=lambda choice, default=default: choice != default)  # type: ignore[misc]
        is_one_of = len(choices) > 1 and not default.startswith("`[")
        facts = f"{', '.join(choices[:-1])} or {choices[-1]}" if is_one_of else default
        text = key + (f" ({facts})" if facts else "")
        lines.append(wrap(f"{text}: {_marked(field.description or '')}", "  ", "- "))
    if overrides:
        lines.append(wrap(f"{', '.join(overrides)}: override those of `target`", "  ", "- "))
    if sections:
        lines.append(wrap(f"{', '.join(sections)}: see below", "  ", "- "))
    return "\n".join(lines)


def _all_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for nested in _models(field.annotation):
            yield from _all_models(nested)


def _option(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(action.choices) if action.choices else "")
    taken = [] if action.nargs == 0 else [str(value)]
    option = f"`{' '.join([*action.option_strings[:1], *taken])}`"
    return wrap(f"{option}: {_marked(action.help or '')}", "  ", "- ")


def _own_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options and arguments of a verb, without those that every verb has."""
    return [
        action
        for action in parser._actions  # noqa: SLF001 - argparse lists them nowhere else
        if action.dest not in {"file", "help", "json", *_OF_RUN}
    ]


@cache
def _verbs() -> dict[str, argparse.ArgumentParser]:
    return _verbs_of(build_parser())


def _verbs_of(parser: argparse.ArgumentParser, group: str = "") -> dict[str, Any]:
    """The verbs of a parser; those of a group with its name before theirs."""
    (verbs,) = (
        action
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
    found: dict[str, Any] = {}
    for name, verb in verbs.choices.items():
        is_group = verb.get_default("verb_group")
        found |= _verbs_of(verb, f"{name} ") if is_group else {group + name: verb}
    return found


# The options that every verb has, by the names that argparse gives them.
_OF_RUN = frozenset(Verb("", RUN_OPTIONS).option_names)


def _shared_options() -> list[str]:
    """The options that several verbs have with the same meaning."""
    lines = [_option(action) for verb in _verbs().values() for action in _own_options(verb)]
    every = [_option(one) for one in _verbs()["status"]._actions if one.dest == "json"]  # noqa: SLF001
    return every + [line for line in dict.fromkeys(lines) if lines.count(line) > 1]


def _verb(name: str) -> str:
    parser, shared = _verbs()[name], _shared_options()
    options = {"".join(a.option_strings): _option(a) for a in _own_options(parser)}
    also = [f"`{option}`" for option, line in options.items() if line in shared]
    does = _sentence(parser.description or "")
    does = f"{does} Shared options: {', '.join(also)}." if also else does
    own = [line for line in options.values() if line not in shared]
    return "\n".join([wrap(_marked(does)), *([""] if own else []), *own])


def _options_of_a_run() -> str:
    """The options that the help of a verb leaves out."""
    lines = []
    for action in _verbs()["maintain"]._actions:  # noqa: SLF001
        if action.dest in _OF_RUN:
            action.help = RUN_OPTIONS[action.option_strings[0]]["help"]
            lines.append(_option(action))
    return "\n".join(lines)


def _metrics() -> str:
    return "\n".join(
        wrap(f"`{name}` ({kind}): {meaning}", "  ", "- ")
        for name, (kind, meaning) in METRICS.items()
    )


def _ledger() -> str:
    """A section for each of the ledger's tables."""
    sections = []
    for table, (what, columns) in MEANINGS.items():
        lines = [f"## {table}: {what}"]
        for names, meaning in columns.items():
            listed = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(wrap(f"{listed}: {meaning}", "  ", "- "))
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _alerts(topic: AttentionTopic) -> str:
    """A line for what needs the same done about it."""
    lines = []
    for texts, remedy in alerts.lines(topic):
        # Each text stays in one line, where a reader's search finds it.
        quoted = ", ".join(f"`{text}`".replace(" ", "\0") for text in texts)
        line = wrap(f"{quoted}: {_linked(_marked(remedy), 'how-to')}", "  ", "- ")
        lines.append(line.replace("\0", " "))
    return "\n".join(lines)


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    **{
        f"keys/{model.__name__}": lambda model=model: _keys(model)  # type: ignore[misc]
        for model in dict.fromkeys(_all_models(PipelineFile))
        if model is not TableTypeOptions  # the keys of TypeOptions again
    },
    **{f"verb/{name}": lambda name=name: _verb(name) for name in _verbs()},  # type: ignore[misc]
    "options/shared": lambda: "\n".join(_shared_options()),
    "options/of-a-run": _options_of_a_run,
    "ledger": _ledger,
    "metrics": _metrics,
    **{
        f"alerts/{topic}": lambda topic=topic: _alerts(topic)  # type: ignore[misc]
        for topic in get_args(AttentionTopic)
    },
}


def _filled(page: Path) -> str:
    """A page with its generated blocks as the code has them now."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}"

    return _BLOCK.sub(fill, page.read_text())


def pages() -> dict[Path, str]:
    """Each page with generated parts, as it should be."""
    found = {
        page: _filled(page)
        for page in sorted(DOCS.rglob("*.md"))
        if _BLOCK.search(page.read_text())
    }
    return {**found, _PAGES / "errors.md": errors_page()}


def blocks_on_pages() -> list[str]:
    """The names of all blocks that some page shows."""
    return [
        found[2]
        for page in sorted(DOCS.rglob("*.md"))
        for found in _BLOCK.finditer(page.read_text())
    ]


def main() -> int:
    """Write the pages, or name the stale ones and return 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail for a stale page")
    is_check = parser.parse_args().check
    stale = {
        page: text
        for page, text in pages().items()
        if not page.exists() or page.read_text() != text
    }
    for page, text in stale.items():
        sys.stdout.write(f"{page.relative_to(DOCS.parent)}\n")
        if not is_check:
            page.write_text(text)
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

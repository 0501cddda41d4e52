"""What the pages name exists: files, anchors, targets, verbs, errors, keys."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

import markdown
import pytest
import yaml

import waldelta.errors
from tools import prose
from waldelta.cli._options import VERBS, VERBS_WITHOUT_FILE
from waldelta.config import PipelineFile, Publication, Source
from waldelta.config.pipeline_file import Target
from waldelta.config.source import Options
from waldelta.error_catalog import REMEDIES
from waldelta.errors import WaldeltaError
from waldelta.lake.ledger import (
    BatchCut,
    ColumnState,
    Decision,
    ExpectationResult,
    Gap,
    Reconciliation,
    Run,
    SlotMove,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import PassedSuite, Profile
from waldelta.lake.ledger.meanings import MEANINGS
from waldelta.lake.ledger.records import ReadWindowSetting

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "docs/how-to/respond-to-alerts.md"
SITE = sorted(ROOT.glob("docs/**/*.md"))
PAGES = prose.pages()
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose.FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).lower())
        for h in headings
    )
    return {text.replace(" ", "-") for text in plain}


def errors() -> dict[str, type[WaldeltaError]]:
    found = {name: kind for name, kind in vars(waldelta.errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, WaldeltaError)}


def error_sections() -> dict[str, str]:
    """The sections of the page of errors, by the error's name."""
    page = (ROOT / "docs/reference/errors.md").read_text()
    return {
        section.partition("\n")[0]: section.partition("\n")[2]
        for section in page.split("\n## ")[1:]
    }


def test_sentences_without_an_actor_are_found():
    """What PostgreSQL, a run or an operator does is said as such."""
    text = "A run reads the slot. The slot is read. It is read by a run. The slot is open. Done."
    assert prose.passives(text) == ["The slot is read."]
    assert prose.passive_share([text, "A run ends."]) == 1 / 6


def wrong_on(found: Mapping[Path, Collection[object]]) -> dict[str, list[object]]:
    """What is wrong, by the file that has it."""
    return {str(path.relative_to(ROOT)): sorted(wrong) for path, wrong in found.items() if wrong}


def test_links_resolve():
    """Every relative link leads to a file, and to a heading where it names one."""
    dead: dict[Path, list[str]] = {page: [] for page in PAGES}
    for page in PAGES:
        for link in LINK.findall(prose.FENCE.sub("", page.read_text())):
            path, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead[page].append(link)
    assert wrong_on(dead) == {}


@pytest.mark.parametrize("page", SITE, ids=[str(page.relative_to(ROOT / "docs")) for page in SITE])
def test_the_site_shows_lists_and_blocks_as_such(page):
    """GitHub accepts more than Python-Markdown, which renders the site: there a list needs a blank
    line before it, and what belongs to a list's item an indentation of four spaces.
    """
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)
    extensions = [one for one in config["markdown_extensions"] if isinstance(one, str)]
    text = page.read_text()
    html = markdown.markdown(text, extensions=extensions)
    lines = [
        line
        for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL)
        for line in paragraph.splitlines()
    ]
    assert [line for line in lines if re.match(r"(?:[-*]|\d+\.) |```|<div", line)] == []
    # A list that is interrupted begins again with 1.
    assert html.count("<ol>") == len(
        re.findall(r"^ *1\. ", prose.FENCE.sub("", text), re.MULTILINE)
    )


def test_make_targets_exist():
    """`make x`, in backquotes or at the start of an indented line, is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        page: set(re.findall(r"(?:`|^ {4,})make ([a-z0-9-]+)", page.read_text(), re.MULTILINE))
        for page in PAGES
    }
    assert wrong_on({page: names - targets for page, names in named.items()}) == {}


DOTTED = re.compile(
    r"(?<![\w./\"-])(?:waldelta_airflow|waldelta|spark_jobs)(?:\.(?!__)[A-Za-z_]\w*)+(?![\w/])"
)
MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for base, folder in ((ROOT / "include", ""), (ROOT, "spark_jobs"))
    for path in sorted((base / folder).rglob("*.py"))
}
# Packages, also those without a file of their own, and what metrics' names begin with.
NOT_MODULES = re.compile(r"waldelta\.(shop|generation|open)\b")


@cache
def is_there(name: str) -> bool:
    """Whether a dotted name is a package, a module or a Java class, or what such a one defines."""
    parts = name.split(".")
    if ROOT.joinpath("include", *parts).with_suffix(".java").exists():
        return True
    for number in range(len(parts), 0, -1):
        module = ".".join(parts[:number])
        if module in MODULES:
            text = MODULES[module].read_text()
            return number == len(parts) or re.search(rf"\b{parts[number]}\b", text) is not None
    return False


@pytest.mark.parametrize(
    "change",
    [
        "Another catalog", "a mask", "protocol (a new kind)", "When a pipeline runs",
        "counts as late", "Kubernetes", "figure on a run's page", "object store**", "consent",
        "decision (a new kind)", "Another reader", "another way",
    ],
)  # fmt: skip
def test_a_change_begins_in_few_files(change):
    """Next year's changes: CONTRIBUTING has one entry for each, whose links resolve."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where to change what")[1]
    entries = text.split("\n## ")[0].split("\n- **")[1:]
    (entry,) = (
        entry for entry in entries if change in " ".join(entry.split("**:")[0].split()) + "**"
    )
    assert 1 <= entry.partition(";")[0].count("](") <= 3


def test_modules_that_are_named_exist():
    """In the pages, and in docstrings, comments and strings of the code."""
    missing = {
        path: {
            name
            for name in DOTTED.findall(path.read_text())
            if not NOT_MODULES.match(name) and not is_there(name)
        }
        for path in [*PAGES, *MODULES.values()]
        if path.name != "CHANGELOG.md"
    }
    assert wrong_on(missing) == {}


COMMAND_LINE = re.compile(r"(?:\S*/)?(?:waldelta|python -m spark_jobs) +([A-Za-z][A-Za-z-]*)")


def test_verbs_exist():
    """`waldelta verb`, in backquotes or a line of code, names a verb, or stands for one."""
    known = {"VERB", *(verb.split()[0] for verb in (*VERBS, *VERBS_WITHOUT_FILE))}
    unknown = {}
    for page in PAGES:
        text = page.read_text()
        code = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)]
        code += [line for fence in prose.FENCE.finditer(text) for line in fence[0].splitlines()]
        named = {found[1] for line in code if (found := COMMAND_LINE.match(line.strip()))}
        unknown[page] = named - known
    assert wrong_on(unknown) == {}


def test_every_verb_is_explained():
    text = (ROOT / "docs/reference/command-line.md").read_text()
    verbs = (*VERBS, *VERBS_WITHOUT_FILE)
    assert [verb for verb in verbs if f"\n### {verb}\n" not in text] == []


def test_the_page_of_errors_has_every_error_that_is_raised():
    """Each has one section; only the bases of the tree are left out."""
    bases = {"WaldeltaError", "SourceError", "SlotError", "LakeError", "CatalogError"}
    assert set(error_sections()) == set(errors()) - bases


def test_the_tree_of_errors_is_drawn_whole():
    """Each class once, below its base."""
    drawn, path = [], {-1: "Exception"}
    for indent, name in re.findall(
        r"^([ |]*)(?:\+-- )?(\w+)(?=  |$)", waldelta.errors.__doc__ or "", re.MULTILINE
    ):
        path = {depth: above for depth, above in path.items() if depth < len(indent)} | {
            len(indent): name
        }
        drawn.append((name, list(path.values())[-2]))
    assert sorted(drawn) == sorted(
        (name, kind.__base__.__name__) for name, kind in errors().items()
    )


def test_alerts_lead_to_what_to_do_for_every_error():
    """A reader with a red task and the last line of its log starts on the page of alerts."""
    first_paragraph = ALERTS.read_text().split("\n## ")[0]
    assert "](../reference/errors.md)" in first_paragraph


def test_the_page_of_errors_has_the_remedies_that_notifiers_get():
    """Where a remedy names a page, the page of errors links it."""

    def words(text: str) -> list[str]:
        text = re.sub(r"\[[^\]]*\]\((?:\.\./)?([\w./-]*)[^)]*\)", r"\1", text)
        return re.findall(r"\w+", re.sub(r"docs/(?:reference/)?", "", text).lower())

    told = {name: section.split("**Do:** ")[1] for name, section in error_sections().items()}
    assert {name: words(text) for name, text in told.items()} == {
        name: words(remedy) for name, remedy in REMEDIES.items()
    }


def test_the_page_of_errors_marks_what_is_retried():
    """SyncFailed and others decide by their causes, and the page says so."""
    marked = {
        name for name, section in error_sections().items() if re.search(r"\bRetried\b", section)
    }
    always = {name for name, kind in errors().items() if kind.retryable}
    assert marked == always | {"SyncFailed", "TargetNotWritable"}


def test_readme_shows_the_real_pipeline_file():
    """Comments and layout aside, README's example is the demo's file."""
    shown = re.search(
        r"```yaml\n(pipeline: flights.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert shown is not None
    real = (ROOT / "include/pipelines/flights.yml").read_text()
    assert yaml.safe_load(shown.group(1)) == yaml.safe_load(real)


@pytest.mark.parametrize(
    "model", [PipelineFile, Source, Publication, Options, Target], ids=lambda m: m.__name__
)
def test_every_key_of_the_pipeline_file_is_explained(model):
    text = (ROOT / "docs/reference/pipeline-file.md").read_text()
    assert [key for key in model.model_fields if not re.search(rf"`[\w.]*\b{key}\b", text)] == []


@pytest.mark.parametrize(
    "row",
    [
        SlotMove, TableState, BatchCut, Run, Gap, ReadWindowSetting, Decision, Reconciliation,
        ExpectationResult, Profile, PassedSuite,
    ],
    ids=lambda row: row.__name__,
)  # fmt: skip
def test_every_ledger_column_is_explained(row):
    """And no other; each table has ``at`` and ``run_id``."""
    explained = [name for names in MEANINGS[row.table][1] for name in names.split(", ")]
    columns = [field.name for field in fields(row) if field.name not in ("at", "run_id")]
    assert sorted(explained) == sorted(columns)


@pytest.mark.parametrize("struct", [ColumnState, TargetCut], ids=lambda struct: struct.__name__)
def test_every_field_of_a_struct_is_explained(struct):
    text = (ROOT / "docs/reference/ledger.md").read_text()
    assert [field.name for field in fields(struct) if f"`{field.name}`" not in text] == []


def test_screenshots_are_small():
    """They are part of every clone."""
    large = {
        path.name: path.stat().st_size
        for path in (ROOT / "docs/images").iterdir()
        if path.stat().st_size > 300_000
    }
    assert large == {}


def test_the_way_in_is_short():
    """From README to a pipeline that Airflow runs, all that a reader with the wheel reads."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    airflow = (ROOT / "docs/how-to/run-in-airflow.md").read_text(encoding="utf-8")
    in_airflow = airflow.split("\n## TLS")[0]
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert sum(len(text.split()) for text in (readme, tutorial, in_airflow)) <= 1200


def test_all_pages_call_the_example_connection_alike():
    """Whoever follows two of them has one connection."""
    named = {
        f"{page.name}: {found}"
        for page in SITE
        for found in re.findall(
            r"AIRFLOW_CONN_SHOP\w*|(?:conn_id: |connections add )shop\w*", page.read_text()
        )
    }
    other = {one for one in named if not re.search(r"(?i)shop_(source|standby)$", one)}
    assert named - other
    assert other == set()


def test_pages_for_users_name_no_path_of_the_repository():
    """The wheel doesn't have these folders; a link leads to the file instead."""
    pages = [*(ROOT / "docs/how-to").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]
    found = [
        f"{page.name}: {text}"
        for page in (ROOT / "docs/tutorial.md", *pages)
        for text in re.findall(r"[`\"][^`\"\n]*\binclude/[^`\"\n]*[`\"]", page.read_text())
    ]
    assert found == []

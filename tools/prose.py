"""Check the prose of README, docs, CONTRIBUTING and CHANGELOG, and print how readable it is.

    python tools/prose.py [PAGE.md …]

The rules are those of CONTRIBUTING.md's "Writing": words that the glossary replaced, sentences and
lines that are too long, too many sentences that name no actor, table cells that are paragraphs,
pages over their word budget. Code, links' addresses and pages that a tool writes from measurements
are left out where a rule is about prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyphen

ROOT = Path(__file__).resolve().parents[1]
MOST_COLUMNS = 100
MOST_IN_A_CELL = 40
MOST_IN_A_SENTENCE = 32
# Share of sentences in the passive voice without an actor.
MOST_PASSIVE = 0.055
# Words of each page or folder.
BUDGETS = {"README.md": 900, "docs": 26_000, "CHANGELOG.md": 600}
# What says less than the field's own word, and that word.
REPLACED = {
    r"(?:tells?|told|telling)(?!(?: \w+)* apart)": "reports, records, says",
    r"fed|(?<!data )feeds?": "source mapping, replicated",
    r"bites?": "read window",
    r"stretch(es)?": "range",
    r"anew": "again",
    r"whoever|somebody|nobody": "the actor: operator, another run, an external writer",
    r"meanwhile": "concurrently, or the moment",
    r"beside": "next to, with",
    r"mend(s|ed|ing)?": "repair, correct",
    r"foreign commits?": "external commit",
    r"verbatim": "raw",
    r"copied anew|recopy|recopied": "copied again",
    r"hand(s|ed)? over": "pass, leave to",
    r"asked for by": "requested by",
    r"as a rule": "usually",
    r"in vain": "without effect",
    r"is to be|are to be": "must",
}
PATTERNS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): by for words, by in REPLACED.items()}
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_WORD = re.compile(r"\S*\w\S*")
_PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being) (?:\w+ly |not |also |only |then |still |never )?"
    r"(?!open|when|between|then|often|even)"
    r"(?:\w+ed|\w+en|read|made|kept|sent|found|held|lost|left|set|done|shown|known|built|put|run)\b"
    r"(?! by\b)",
    re.IGNORECASE,
)
# A single link, or a word, that is too long by itself can't be broken.
_UNBREAKABLE = re.compile(r"\s*(?:[-*] |\d+\. )?\S+")
_SYLLABLES = pyphen.Pyphen(lang="en_US")


def pages() -> list[Path]:
    """The pages that people read."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def words(text: str) -> list[str]:
    """What counts as a word: anything with a letter or digit."""
    return _WORD.findall(text)


def prose(text: str) -> str:
    """A page without code blocks, comments and addresses; inline code becomes the word ``code``."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = "\n".join(_without_indented_code(text.splitlines()))
    return _CODE.sub("code", _LINK.sub(r"\1", text))


def _without_indented_code(lines: Sequence[str]) -> Iterator[str]:
    """The lines that aren't code; those of a list's items lose their indentation."""
    in_list = False
    for line in lines:
        if line and not line.startswith(" "):
            in_list = _ITEM.match(line) is not None
        if in_list:
            yield line.strip()
        elif not line.startswith("    "):
            yield line


def sentences(text: str) -> Iterator[str]:
    """The sentences of the paragraphs and list items of a page's prose."""
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", prose(text)):
        if block.lstrip().startswith(("|", "#")):
            continue
        flat = " ".join(block.split())
        yield from (part for part in re.split(r"(?<=[.!?:;])\s+", flat) if words(part))


def problems(page: Path) -> Iterator[str]:
    """What a page breaks of the rules, with the place."""
    name, text = page.relative_to(ROOT), page.read_text()
    for number, line in enumerate(FENCE.sub(_blank, text).splitlines(), 1):
        if len(line) > MOST_COLUMNS and not _UNBREAKABLE.fullmatch(line):
            yield f"{name}:{number}: {len(line)} columns; at most {MOST_COLUMNS}"
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if (count := len(words(cell))) > MOST_IN_A_CELL:
                    yield f"{name}:{number}: {count} words in a cell; at most {MOST_IN_A_CELL}"
    plain = prose(text)
    for pattern, better in PATTERNS.items():
        for found in pattern.finditer(plain):
            where = " ".join(plain[max(0, found.start() - 30) : found.end() + 30].split())
            yield f"{name}: {found[0]!r} ({better}): … {where} …"
    for sentence in sentences(text):
        if (count := len(words(sentence))) > MOST_IN_A_SENTENCE:
            yield f"{name}: {count} words in a sentence: {sentence[:90]} …"


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def over_budget() -> Iterator[str]:
    """Pages and folders with more words than they may have."""
    for name, most in BUDGETS.items():
        path = ROOT / name
        chosen = sorted(path.rglob("*.md")) if path.is_dir() else [path]
        if (count := sum(len(words(page.read_text())) for page in chosen)) > most:
            yield f"{name}: {count:,} words; at most {most:,}"


def passives(text: str) -> list[str]:
    """Returns the sentences with a passive verb that no "by" follows."""
    return [sentence for sentence in sentences(text) if _PASSIVE.search(sentence)]


def passive_share(texts: Iterable[str]) -> float:
    """Returns the share of such sentences in all."""
    said = [sentence for text in texts for sentence in sentences(text)]
    return sum(_PASSIVE.search(sentence) is not None for sentence in said) / max(1, len(said))


def reading_ease(text: str) -> float:
    """Flesch's reading ease: 100 is very easy, 50 is fairly difficult, 30 is difficult.

    R. Flesch, "A new readability yardstick", Journal of Applied Psychology 32 (1948).
    """
    found = list(sentences(text))
    of_all = [re.sub(r"[^A-Za-z]", "", word) for one in found for word in words(one)]
    read = [word for word in of_all if word]
    if not read:
        return 100.0
    syllables = sum(len(_SYLLABLES.positions(word)) + 1 for word in read)
    return 206.835 - 1.015 * len(read) / len(found) - 84.6 * syllables / len(read)


def main(arguments: Sequence[str]) -> int:
    """Print the problems and the reading level; 1 when there is a problem."""
    chosen = [Path(name).resolve() for name in arguments] or pages()
    found = [problem for page in chosen for problem in problems(page)]
    found += [] if arguments else list(over_budget())
    texts = {page: page.read_text() for page in chosen}
    count = sum(len(words(text)) for text in texts.values())
    ease = reading_ease("\n\n".join(texts.values()))
    passive = passive_share(texts.values())
    if passive > MOST_PASSIVE and not arguments:
        found.append(
            f"{passive:.1%} of the sentences name no actor; at most {MOST_PASSIVE:.1%}:"
            " `python tools/prose.py PAGE.md` lists them"
        )
    if arguments:
        for sentence in (one for text in texts.values() for one in passives(text)):
            print(f"no actor: {sentence}")
    eases = {page: reading_ease(text) for page, text in texts.items()}
    hardest = min(eases, key=eases.__getitem__)
    for problem in found:
        print(problem)
    print(
        f"prose: {len(chosen)} pages, {count:,} words, {len(found)} problems; reading ease"
        f" {ease:.0f} (Flesch; hardest: {hardest.relative_to(ROOT)},"
        f" {eases[hardest]:.0f}); {passive:.1%} of the sentences name no actor"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

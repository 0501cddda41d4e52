"""One mutation: a defect that an engineer could write, and the tests that catch it."""

from dataclasses import dataclass
from pathlib import Path

# Below a checkout.
LIBRARY = Path("include/waldelta")


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces ``text``, which occurs exactly once in ``file``, by ``replacement``.

    ``file`` is relative to the library. ``breaks`` is a sentence about what is wrong then.
    ``tests`` are files below ``tests/``, or single tests of them (``file::test``).
    """

    file: str
    text: str
    replacement: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def is_unit(self) -> bool:
        """Whether unit tests alone catch it."""
        return all(test.startswith("unit/") for test in self.tests)

    def path(self, root: Path) -> Path:
        """Return the file that it changes, in a checkout."""
        return root / LIBRARY / self.file

    def mutated(self, source: str) -> str:
        """The file's text with the defect; raises ValueError unless ``text`` occurs once."""
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"{self.file}: found {found} times instead of once: {self.text!r}")
        return source.replace(self.text, self.replacement)

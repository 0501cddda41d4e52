"""The repository's Python files."""

from pathlib import Path

from tools.messages import nodes_of, tree_of

__all__ = ["ROOT", "modules", "nodes_of", "tree_of"]

ROOT = Path(__file__).parents[2]


def modules(folder: str) -> list[Path]:
    """The Python files below a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))

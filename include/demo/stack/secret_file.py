"""The embedded stack's passwords and keys, created once in a file that only its owner can read."""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from demo.stack.airflow_processes import AirflowSecrets, write_private


def _token() -> str:
    return secrets.token_urlsafe(24)


def _fernet_key() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


@dataclass(frozen=True, repr=False)
class StackSecrets:
    """Every secret of one stack.

    They live as long as its data, since the metadata database is encrypted with one of them.
    """

    admin_password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    airflow_database: str = field(default_factory=_token)
    source: str = field(default_factory=_token)
    spark_token: str = field(default_factory=_token)
    store: str = field(default_factory=_token)
    fernet_key: str = field(default_factory=_fernet_key)
    jwt_secret: str = field(default_factory=lambda: secrets.token_urlsafe(64))
    api_secret: str = field(default_factory=_token)

    @property
    def airflow(self) -> AirflowSecrets:
        return AirflowSecrets(
            self.admin_password, self.fernet_key, self.jwt_secret, self.api_secret
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file, or create it; one of an earlier version gets the secrets that it lacks."""
        known = json.loads(path.read_text()) if path.exists() else {}
        found = cls(**known)
        if asdict(found) != known:
            write_private(path, json.dumps(asdict(found), indent=1) + "\n")
        return found

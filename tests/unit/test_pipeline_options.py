"""Options that this version can't honour are refused, never taken in silence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from waldelta.pipeline_file import Maintenance, Options


@pytest.mark.parametrize(
    "options", [{"binary": True}, {"streaming": "on"}, {"two_phase": True}, {"messages": True}], ids=str
)
def test_options_beyond_protocol_version_1(options):
    """The message names the option and what to do."""
    with pytest.raises(ValidationError, match=f"{next(iter(options))}: this version reads protocol version 1"):
        Options(**options)


def test_retention_below_a_week():
    """Delta's VACUUM would refuse it at night."""
    with pytest.raises(ValidationError, match="168"):
        Maintenance(keep_versions_hours=24)

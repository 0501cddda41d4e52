"""Options of the plugin: which protocol version they need, and which can't be honoured and are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from waldelta.peek import most_changes, plugin_options, protocol_version, whole
from waldelta.pipeline_file import Maintenance, Options, Publication, Source


def source(**options):
    return Source(
        conn_id="c", slot="s", publications=(Publication(name="p", all_tables=True),), options=Options(**options)
    )


@pytest.mark.parametrize(
    "options, version, sent",
    [
        ({}, 1, {}),
        ({"messages": True}, 1, {"messages": "true"}),
        ({"binary": True}, 1, {"binary": "true"}),
        ({"origin": "none"}, 1, {"origin": "none"}),
        ({"streaming": "on"}, 2, {"streaming": "on"}),
        ({"streaming": True}, 2, {"streaming": "on"}),  # YAML's bare on
        ({"streaming": False}, 1, {}),
        ({"two_phase": True}, 3, {"two_phase": "true"}),
        ({"two_phase": True, "streaming": "on"}, 3, {"streaming": "on", "two_phase": "true"}),
        ({"streaming": "parallel"}, 4, {"streaming": "parallel"}),
    ],
    ids=str,
)
def test_the_lowest_version_that_serves(options, version, sent):
    """Only what is asked for is sent to the server."""
    chosen = source(**options)
    assert protocol_version(chosen.options) == version
    names = plugin_options(chosen)
    expected = {"proto_version": str(version), "publication_names": '"p"'} | sent
    assert dict(zip(names[::2], names[1::2], strict=True)) == expected
    assert protocol_version(whole(chosen).options) == (3 if options.get("two_phase") else 1)
    assert most_changes(chosen, 5) == (None if "streaming" in sent else 5)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"messages": True, "streaming": "on"}, "messages and streaming exclude each other"),
        ({"streaming": "maybe"}, "'off', 'on' or 'parallel'"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, match):
    """The message names the option and what to do."""
    with pytest.raises(ValidationError, match=match):
        Options(**options)


def test_retention_below_a_week():
    """Delta's VACUUM would refuse it at night."""
    with pytest.raises(ValidationError, match="168"):
        Maintenance(keep_versions_hours=24)

"""Renderer of Great Expectations' result tables that distinguishes warnings from failures.

Great Expectations marks every unmet expectation alike, whatever its severity. It loads this class
by name.
"""

from __future__ import annotations

from typing import Any

from great_expectations.render.renderer.content_block import (
    ValidationResultsTableContentBlockRenderer,
)

WARNING_ICON = "⚠"


class SeverityTableRenderer(ValidationResultsTableContentBlockRenderer):
    """Marks an unmet expectation of severity warning with WARNING_ICON; otherwise as its base
    class.
    """

    @classmethod
    def _get_content_block_fn(cls, *args: Any, **kwargs: Any) -> Any:
        render = super()._get_content_block_fn(*args, **kwargs)
        if render is None:
            return None

        def rows(*args: Any, result: Any, **kwargs: Any) -> Any:
            found = render(*args, result=result, **kwargs)
            if not result.success and result.expectation_config.severity == "warning":
                icon = found[0][0].string_template
                icon["params"] = icon["params"] | {"markdown_status_icon": WARNING_ICON}
            return found

        return rows

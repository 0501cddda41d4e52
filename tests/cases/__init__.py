"""Tables of cases."""

from collections.abc import Sequence

import pytest


def cases(names: str, table: Sequence[tuple[object, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test by cases, each with its id in front."""
    return pytest.mark.parametrize(
        names, [pytest.param(*case[1:], id=str(case[0])) for case in table]
    )

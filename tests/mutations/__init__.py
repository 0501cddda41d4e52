"""Defects that an engineer could write, each with the tests that catch it.

``python -m tests.mutations`` tries them. It isn't part of ``make test``, but a unit test checks
that each text still occurs exactly once.
"""

from tests.mutations import collapse, consume, decode, merge, recovery, row_filters, stage, targets
from tests.mutations.mutation import Mutation

# Numbered from 1 in this order.
MUTATIONS: tuple[Mutation, ...] = (
    *decode.MUTATIONS,
    *collapse.MUTATIONS,
    *stage.MUTATIONS,
    *merge.MUTATIONS,
    *consume.MUTATIONS,
    *recovery.MUTATIONS,
    *row_filters.MUTATIONS,
    *targets.MUTATIONS,
)

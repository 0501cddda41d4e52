"""Seeds of the random tests: always the same in `make test`, new in every soak."""

import os
import random

ALWAYS = 20261121


def is_long() -> bool:
    """Whether this is a soak: a run with WALDELTA_ROUNDS or WALDELTA_SCENARIOS."""
    return bool(os.environ.get("WALDELTA_ROUNDS") or os.environ.get("WALDELTA_SCENARIOS"))


def is_on_spark() -> bool:
    """Whether every test with a session runs on Spark, as in ``make test-all``."""
    return "WALDELTA_TESTS_ON_SPARK" in os.environ or is_long()


def chosen_seed() -> int:
    """WALDELTA_SEED, or a new seed in a soak; it is printed."""
    seed = int(
        os.environ.get("WALDELTA_SEED") or (random.randrange(1 << 30) if is_long() else ALWAYS)
    )
    print(f"WALDELTA_SEED={seed}")
    return seed


def chosen_random() -> random.Random:
    """A generator of the chosen seed."""
    return random.Random(chosen_seed())


def rounds(number: int) -> range:
    """How often a random test repeats: an eighth of its soak's ``number``."""
    return range(number if is_long() else number // 8)

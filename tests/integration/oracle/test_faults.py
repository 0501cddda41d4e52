"""A few cells of the fault matrix in every test run; all of it is `make soak`'s
(docs/explanation/guarantees.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.soak.fault_matrix import Matrix
from tests.soak.scene import Scene
from tests.soak.steps import STEPS
from waldelta.slot import recovery
from waldelta.stages.maintain import maintain

pytestmark = [pytest.mark.pg, pytest.mark.spark]

CELLS = [
    ("consume.got", "server"),
    ("within get: consume.copied", "network"),
    ("apply.merging", "zombie"),
]


@pytest.fixture(scope="module")
def matrix(postgres, spark_jvm, tmp_path_factory) -> Iterator[Matrix]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    scene = Scene(postgres, tmp_path_factory.mktemp("faults"), seed)
    scene.use(spark_jvm())
    scene.set_up()
    with pytest.MonkeyPatch.context() as patch:
        # Which the matrix sets, for good.
        patch.setattr(maintain, "now", maintain.now)
        patch.setattr(recovery, "MOVING", recovery.MOVING)
        yield Matrix([scene], alone=True)
    scene.close()


@pytest.mark.soak("cells of the fault matrix")
def test_whatever_fails_the_next_run_puts_it_right(matrix):
    """Killed, cut off, with its server gone, or woken up too late: nothing is lost, and nothing is
    there twice.
    """
    steps = {step.name: step for step in STEPS}
    done = list(matrix.run([(steps[step], fault) for step, fault in CELLS]))
    assert [cell for cell in done if cell.problems or cell.ended.startswith("not reached")] == [], (
        matrix.scenes[0].seed
    )

"""Great Expectations without what a check doesn't use: others find all of it."""

import subprocess
import sys

import pytest

IMPORT = """
import sys
from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
import_great_expectations(sys.argv[1:])
unused = ("sqlalchemy", "psycopg2", "pyspark.ml", "scipy.stats._stats_py", "altair.vegalite")
print([name for name in unused if name in sys.modules])
import altair, pyspark.ml.feature, scipy.stats, sqlalchemy
bucketizer = pyspark.ml.feature.Bucketizer.__name__
print(sqlalchemy.__name__, altair.Chart.__name__, scipy.stats.norm.cdf(0), bucketizer)
import great_expectations as gx
from great_expectations.compatibility import pyspark as known
print(gx.expectations.ExpectColumnValuesToBeUnique.__name__, isinstance(known.Bucketizer, type))
"""


def run(*kinds: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *kinds], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_what_a_check_doesnt_use_is_not_imported():
    """Neither databases' drivers nor statistics nor charts; others import them as ever."""
    unused, usable, known = run("expect_column_values_to_be_unique")
    assert unused == "[]"
    assert usable == "sqlalchemy Chart 0.5 Bucketizer"
    assert known == "ExpectColumnValuesToBeUnique False"


@pytest.mark.nightly("an import that a run needs")
def test_an_expectation_that_needs_them_has_them():
    """KL divergence bins numbers with pyspark.ml."""
    unused, _, known = run("expect_column_kl_divergence_to_be_less_than")
    assert "pyspark.ml" in unused
    assert known == "ExpectColumnValuesToBeUnique True"

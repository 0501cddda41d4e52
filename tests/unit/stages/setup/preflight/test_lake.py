"""A lake on S3 is refused where Spark's commits may replace others unnoticed."""

import pytest

from tests.support.pipelines import pipeline_file
from waldelta.errors import PreflightFailed
from waldelta.lake import Lake
from waldelta.stages.setup.preflight.lake import check_log_store, is_conditional, judge_store

DYNAMODB = "io.delta.storage.S3DynamoDBLogStore"
# A log store, delta-rs's options, whether commits of both are kept.
STORES = {
    "none": ("", {}, False),
    "Delta's for one driver": ("io.delta.storage.S3SingleDriverLogStore", {}, False),
    "the same by its old name": ("org.apache.spark.sql.delta.storage.S3SingleDriverLogStore", {},
     False),
    "one that renames": ("io.delta.storage.HDFSLogStore", {}, False),
    "DynamoDB for Spark alone": (DYNAMODB, {}, False),
    "DynamoDB for both": (DYNAMODB, {"AWS_S3_LOCKING_PROVIDER": "dynamodb"}, True),
    "somebody's own": ("org.example.S3ConditionalLogStore", {}, True),
    "and delta-rs overwrites": ("org.example.S3ConditionalLogStore",
     {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", STORES)
def test_which_log_stores_keep_the_commits_of_others(case):
    store, options, expected = STORES[case]
    assert is_conditional(store, options) is expected
    target = pipeline_file("s3a://bucket/lake", "shop").target
    if expected:
        check_log_store(target, store, Lake(target.root, options))
        return
    with pytest.raises(
        PreflightFailed,
        match=r"spark\.delta\.logStore\.s3a\.impl.*target\.accept_unsafe_store: true",
    ) as refused:
        check_log_store(target, store, Lake(target.root, options))
    assert store in str(refused.value)
    assert list(judge_store(target)) == []


@pytest.mark.parametrize(
    "root",
    [
        "file:///lake",
        "abfss://files@account.dfs.core.windows.net/lake",
        "gs://bucket/lake",
        "hdfs://name/lake",
    ],
)
def test_other_stores_commit_by_any_log_store(root):
    target = pipeline_file(root, "shop", target={"root": root, "accept_unsafe_store": True}).target
    plain = pipeline_file(root, "shop").target
    check_log_store(plain, "", Lake(root))
    assert list(judge_store(target)) == []


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_store_that_is_accepted(scheme):
    """Setup warns."""
    root = f"{scheme}://bucket/lake"
    target = pipeline_file(root, "shop", target={"root": root, "accept_unsafe_store": True}).target
    check_log_store(target, "", Lake(target.root))
    (found,) = judge_store(target)
    assert found.severity == "warning"
    assert root in found.text

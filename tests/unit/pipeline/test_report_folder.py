"""Where Data Docs are: in the lake, also in an object store, or in a folder of this machine."""

import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.cases import cases
from tests.support.pipelines import pipeline_file
from waldelta.config.quality import Quality
from waldelta.errors import ConfigError
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation, now
from waldelta.pipeline.report_folder import docs_folder, docs_uri, judge_docs
from waldelta.stages.check.reports.data_docs import list_reconciliation

LAKE = Lake("s3a://bucket/lake")
STORES = (
    "s3a://bucket/lake",
    "s3://bucket/lake",
    "abfss://files@account.dfs.core.windows.net/lake",
    "gs://bucket/lake",
)


@pytest.mark.parametrize("root", STORES)
def test_in_an_object_store_they_are_in_the_lake(root):
    """What was written there as a file would lie in a folder of that name here."""
    pipeline = pipeline_file(root, "shop", quality={})
    assert docs_folder(pipeline) is None
    assert docs_uri(root) == f"{root}/_waldelta/data_docs"
    assert list(judge_docs(pipeline)) == []


FOLDERS = [
    ("the lake's own", "file:///lake", {}, "/lake/_waldelta/data_docs"),
    ("named", "s3a://bucket/lake", {"data_docs": "/docs"}, "/docs"),
    ("named as a URI", "s3a://bucket/lake", {"data_docs": "file:///docs"}, "/docs"),
]


@cases("root, quality, folder", FOLDERS)
def test_a_folder_of_this_machine_is_taken(root, quality, folder):
    pipeline = pipeline_file(root, "shop", quality=quality)
    assert docs_folder(pipeline) == Path(folder)
    assert list(judge_docs(pipeline)) == []


def test_without_checks_nothing_is_said():
    assert list(judge_docs(pipeline_file(STORES[0], "shop", quality={"enabled": False}))) == []


@pytest.mark.parametrize("uri", [*STORES, "hdfs://name/docs"])
def test_an_object_store_named_for_the_pages_is_refused(uri):
    """By the pipeline file, not by the first check."""
    with pytest.raises(ValidationError, match="name a local folder"):
        Quality(data_docs=uri)


FOUND = [Reconciliation(now(), "r", "public.t", "equal")]
HELD = {
    "there is none": (None, True),
    "it is empty": ((), True),
    "reports": (("checks/r/entries.json", "index.html"), True),
    "reports and another's file": (("reconciliations/r/x.html", "mine.txt"), True),
    "other files": (("passwords.json",), False),
    "another's pages": (("index.html", "validations/x.html"), False),
}


@pytest.mark.parametrize(("held", "taken"), HELD.values(), ids=HELD)
def test_a_named_folder_of_other_files_is_refused(held, taken, tmp_path):
    """By setup, and by what would write there: it isn't touched."""
    folder = tmp_path / "docs"
    for name in held or ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if held is not None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    pipeline = pipeline_file(STORES[0], "shop", quality={"data_docs": str(folder)})
    assert [found.severity for found in judge_docs(pipeline)] == ([] if taken else ["problem"])
    if taken:
        assert list_reconciliation(pipeline, LAKE, FOUND) == folder / "index.html"
    else:
        with pytest.raises(
            ConfigError, match="holds other files than reports: name a new or an empty folder"
        ):
            list_reconciliation(pipeline, LAKE, FOUND)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert sorted(
            p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
        ) == sorted(held)

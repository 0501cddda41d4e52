"""Data Docs: what a check puts on the list of reports."""

import re
from datetime import UTC, datetime

from tests.support.pipelines import pipeline_file
from waldelta.errors import StateError
from waldelta.lake import Lake
from waldelta.stages.check.reports.data_docs import list_reports
from waldelta.stages.check.reports.docs_store import CHECKS, DocsStore
from waldelta.stages.check.suite.expectation import TableVerdict, unchecked


def test_a_run_is_listed_with_the_table_that_it_couldnt_check(tmp_path):
    """It failed for it; there is no page to lead to, also where no table has one."""
    pipeline = pipeline_file(f"file://{tmp_path}", "shop", ["public.t"])
    docs = DocsStore(pipeline, Lake(pipeline.target.root))
    gone = TableVerdict(
        "public.gone", None, (unchecked(StateError("it isn't there")),), (), None, 0.0
    )
    for links in ([], ["public.t"]):
        run = docs.begin(CHECKS, "run", at := datetime.now(UTC))
        pages = [run.write_page(name, "<h1>page</h1>") for name in links]
        verdicts = [gone, *(TableVerdict("public.t", 3, (), (), page, 0.0) for page in pages)]
        index = list_reports(run, "run", at, verdicts).read_text()
        assert re.findall(r"<a [^>]+>([^<]+)", index) == links
        assert 'class="mark failed"' in index
    assert "1 of 1 not met<ul><li>couldn&#x27;t be checked: it isn&#x27;t there" in index
    assert index.count("public.gone") == 2

"""The other half of the pages: see `test_docs.py`. A file of its own is a process of its own."""

from __future__ import annotations

import pytest

from doc_blocks import ROOT, documents, read
from doc_runner import PageRun, warm_server

PAGES = documents()[1::2]


@pytest.fixture(scope="module")
def server():
    with warm_server() as running:
        yield running


@pytest.mark.slow_parameters(
    "docs/benchmarks.md",
    "docs/environments.md",
    "docs/export.md",
    "docs/quick_start.md",
    "docs/report.md",
    "docs/reward_loop.md",
    "docs/security.md",
)
@pytest.mark.parametrize("path", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])
def test_the_blocks_of_a_page_run(path, server, tmp_path):
    page = PageRun(read(path), tmp_path / "page", server)
    page.all()
    assert not page.differences(), "\n\n".join(page.differences())

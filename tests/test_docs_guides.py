"""The other half of the pages: see `test_docs.py`. A file of its own is a process of its own."""

import pytest

from doc_pages import PAGES
from test_docs import differences, parameters, server

__all__ = ["server"]


@pytest.mark.parametrize("path", parameters(PAGES[1::2]))
def test_the_blocks_of_a_page_run(path, server, tmp_path):
    assert differences(path, server(path, tmp_path / "page")) == []

"""What tests of environment servers share."""

import pytest

from sandbox_processes import wait_until


@pytest.fixture
def server(shared):
    """The server; when the test has ended, so have all sessions."""
    yield shared
    wait_until(lambda: len(set(shared.counts())) == 1)

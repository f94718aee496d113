"""What tests of rewards share."""

import pytest

import threads


@pytest.fixture(scope="module")
def plain():
    """A reward server with a model that answers at once."""
    from served_scores import Running

    with Running() as running:
        yield running


one_thread = threads.one_thread

"""What tests of rewards share."""

import pytest
import torch


@pytest.fixture(scope="module")
def plain():
    """A reward server with a model that answers at once."""
    from served_scores import Running

    with Running() as running:
        yield running


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models are quickest, and give the same bits everywhere, so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

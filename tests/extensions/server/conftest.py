"""What tests of rewards share."""

import pytest

import threads
from reward_models import small_model, write_model


@pytest.fixture(scope="module")
def plain():
    """A reward server with a model that answers at once."""
    from served_scores import Running

    with Running() as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two reward models in directories of the same name."""
    found = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp(f"model-{seed}") / "rm"
        write_model(small_model(seed=seed, max_length=512), directory)
        found.append(directory)
    return found


one_thread = threads.one_thread

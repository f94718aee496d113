"""What tests of environments share."""

import dataclasses

import pytest

import threads
from reward_models import small_model, write_model

one_thread = threads.one_thread


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A reward model with a contract, golden scores, and the mean and deviation of its scores."""
    directory = tmp_path_factory.mktemp("model")
    loaded = small_model()
    contract = loaded.contract.with_rules(mean=0.5, std=2.0, num_reference=10)
    write_model(dataclasses.replace(loaded, contract=contract), directory)
    return directory

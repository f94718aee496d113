"""What tests of `laurel eval` share: a warm command, and a small reward model."""

import pytest

from reward_models import small_model, write_model
from runs import WarmCommand


@pytest.fixture(scope="module")
def laurel(tmp_path_factory):
    command = WarmCommand(tmp_path_factory.mktemp("warm"))
    yield command
    command.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(small_model(), directory)
    return directory

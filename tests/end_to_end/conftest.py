"""What several files share: models, which nobody changes."""

import pytest

import runs
from policy_runs import sft, sft_settings
from reward_models import small_model, write_model
from runs import settings, train, write_rows


@pytest.fixture(scope="session")
def laurel():
    return runs.laurel_here


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A policy that answers every task of `sums` with one of two answers, each as often."""
    saved = sft(sft_settings(tmp_path_factory.mktemp("model"), "sft.max_num_epochs=8"))
    assert saved.outcome.latest is not None
    return saved.outcome.latest


@pytest.fixture(scope="session")
def writer(tmp_path_factory):
    """A policy that writes functions which give 1 or 2, each as often right as wrong."""
    directory = tmp_path_factory.mktemp("writer")
    shown = [
        {"input": f"Give {1 + i % 2} ({i % 16})", "output": f"def f(): return {1 + (i // 3) % 2}"}
        for i in range(96)
    ]
    write_rows(directory / "demonstrations.jsonl", shown)
    length = ("sft.max_num_epochs=12", "policy.max_total_sequence_length=96")
    saved = sft(sft_settings(directory, *length)).outcome.latest
    assert saved is not None
    return saved


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """A checkpoint of `laurel rm`."""
    latest = train(settings(tmp_path_factory.mktemp("judge"), "rm.max_num_steps=5")).outcome.latest
    assert latest is not None
    return latest


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward_model")
    write_model(small_model(), directory)
    return directory

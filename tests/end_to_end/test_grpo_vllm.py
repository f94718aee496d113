"""`laurel grpo` with completions drawn by a real vLLM."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

from laurel.errors import EngineError
from laurel.observe.loggers import read_metrics
from policy_fakes import HOOKS
from policy_runs import HOOKED, MATCHES, grpo, grpo_settings, metrics_of, sft, sft_settings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"
)

VLLM = ("policy.generation.backend=vllm", "policy.generation.max_concurrent=16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `policy_runs.warm_started`, with heads of a size that vLLM computes on a CPU."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    heads = "policy.scratch.num_heads=1"
    saved = sft(sft_settings(directory, heads, "sft.max_num_epochs=8")).outcome.latest
    assert saved is not None
    return saved


def test_vllm_draws_from_the_weights_of_each_step(tmp_path: Path, model: Path) -> None:
    """Were a step drawn from older weights, its log-probs would differ by far more than rounding.

    At this learning rate a step changes log-probabilities by hundredths.
    """
    run = grpo(grpo_settings(tmp_path, model, *VLLM, *MATCHES))
    assert run.outcome.ended == "finished"
    assert "drawn by VllmEngine" in run.text
    steps = metrics_of(tmp_path)
    trained = [figures for figures in steps.values() if "train/loss" in figures]
    assert len(trained) >= 2, "two steps with a signal, or nothing is shown"
    for figures in trained:
        assert figures["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert figures["train/staleness"] == 0.0
    logged = read_metrics(tmp_path / "logs" / "exp_001" / "metrics.jsonl")
    assert any("timing/train/prepare_for_generation/wake" in line for line in logged), (
        "the engine rests while the learner works"
    )


def test_vllm_that_dies_ends_the_run_with_a_reason(tmp_path: Path, model: Path) -> None:
    psutil = pytest.importorskip("psutil")
    killed: list[int] = []

    def kill_engine() -> None:
        for child in psutil.Process(os.getpid()).children(recursive=True):
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                killed.append(child.pid)
                child.send_signal(signal.SIGKILL)

    HOOKS["update"] = kill_engine
    try:
        with pytest.raises(EngineError):
            grpo(grpo_settings(tmp_path, model, *VLLM, *MATCHES, *HOOKED))
    finally:
        HOOKS.clear()
    assert killed

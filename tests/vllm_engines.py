"""vLLM engines on tiny models made in the test. They take seconds to start: share them."""

from __future__ import annotations

import importlib.util
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
import tiny_tokenizers
from laurel.config.grpo import GenerationConfig
from laurel.extensions.vllm import processes, settings
from laurel.extensions.vllm.engine import VllmEngine
from laurel.generation.load import GeneratorSpec
from laurel.types import Weights
from processes import fork_of, forked, with_forks

HAS_VLLM = importlib.util.find_spec("vllm") is not None
MAX_LENGTH = 1024
HEAD_DIM = 32
"""vLLM's attention on CPUs knows none smaller."""


def require_vllm() -> None:
    if not HAS_VLLM:
        pytest.skip("vLLM is not installed: make test-vllm")


def random_model(model_type: str, *, tied: bool, seed: int, vocab_size: int) -> Any:
    """Weights so large that a stale tensor moves log-probabilities by whole numbers."""
    config = AutoConfig.for_model(
        model_type,
        **{
            **tiny.COMMON,
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "head_dim": HEAD_DIM,
            "tie_word_embeddings": tied,
        },
    )
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    return tiny.draw_weights(factory.from_config(config, dtype=torch.float32), 0.2).eval()


class Learner:
    """Holds the weights that the engine should have."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, ids: Any) -> np.ndarray[Any, Any]:
        """The probe."""
        whole = torch.as_tensor(np.asarray(ids)).long()
        with torch.inference_mode():
            logprobs = self.model(input_ids=whole[None]).logits[0].float().log_softmax(-1)
        found: np.ndarray[Any, Any] = logprobs[:-1].gather(1, whole[1:, None])[:, 0].numpy()
        return found

    def weights(self, version: int) -> Weights:
        return Weights(version=version, tensors=lambda: self.model.state_dict().items())


def scheduler_of(processes: list[psutil.Process]) -> psutil.Process:
    """The first of an engine's processes, or what was forked for it."""
    return fork_of(processes[0].pid) or processes[0]


@contextmanager
def small_cache() -> Iterator[None]:
    """What starts meanwhile has little room for keys and values, all of which it fills at first."""
    with patch.object(settings, "CPU_CACHE_BYTES", 1 << 26):
        yield


@contextmanager
def forked_engines() -> Iterator[None]:
    """Engines that start meanwhile are forked (`processes.py`), and know their forks as theirs."""
    known = with_forks(processes.processes_of)
    with forked(), patch.object(processes, "processes_of", known):
        yield


@contextmanager
def started(
    model: Any,
    probe: Any,
    *,
    kind: type[VllmEngine] = VllmEngine,
    max_concurrent: int = 6,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[VllmEngine]:
    """An engine that starts with a model's weights, and is closed in the end.

    Its processes are forked (`processes.py`).
    """
    tokenizer = tokenizer or tiny_tokenizers.chatml()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        given: dict[str, Any] = {
            "settings": GenerationConfig(max_concurrent=max_concurrent),
            "max_length": MAX_LENGTH,
            "end_ids": (tokenizer.eos_token_id,),
        }
        spec = GeneratorSpec(**{**given, **options})
        with small_cache(), forked_engines():
            engine = kind(Path(directory), spec, precision="float32", probe=probe)
    # The directory is gone: nothing reads it again.
    try:
        yield engine
    finally:
        engine.close()


def start_and_wait(ready: Any, vocab_size: int) -> None:
    """A program with an engine, which tells when it is there and then waits to be killed."""
    model = random_model("qwen3", tied=True, seed=0, vocab_size=vocab_size)
    with started(model, Learner(model).logprobs):
        ready.send("started")
        signal.pause()

"""Groups of processes that score with the small reward models of the tests."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from laurel.config.policy import ScratchConfig, TokenizerConfig
from laurel.models.loading.reward_model import LoadedRewardModel, load_reward_model
from laurel.models.parallel.mesh import parallelise
from laurel.models.spec import ModelSpec, ParallelShape
from laurel.rewards.replicas import GroupScorer, ScoringWorker
from laurel.rewards.scorer import LocalScorer

MAX_LENGTH = 64
BATCH_TOKENS = 100
TEXTS = ("the laurel grows by the western gate", "bread and wine", "an old man of the river")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
)


def loaded(packing: bool) -> LoadedRewardModel:
    """A random model with weights so large that every word shows in the score."""
    spec = ModelSpec(
        scratch=ScratchConfig(hidden_size=32, vocab_size=400),
        tokenizer=TokenizerConfig(chat_template=TEMPLATE),
        precision="float32",
        reads_forests=packing,
    )
    model = load_reward_model(
        spec,
        seed=0,
        max_length=MAX_LENGTH,
        truncation_side="left",
        device=torch.device("cpu"),
        texts=TEXTS,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def local(packing: bool, *, weight: float = 1.0, poison: str = "") -> LocalScorer:
    """A `LocalScorer`, its head multiplied by `weight` and one word made NaN."""
    torch.set_num_threads(1)
    source = loaded(packing)
    with torch.no_grad():
        source.model.classifier.score.weight.mul_(weight)
        if poison:
            (token,) = source.contract.tokenizer(poison)["input_ids"]
            source.model.classifier.get_input_embeddings().weight[token] = math.nan
    return LocalScorer(source.model, source.contract, batch_tokens=BATCH_TOKENS)


def load(*, weight: float, poison: str, say: Any, mesh: Any) -> LocalScorer:
    """For a `ScoringWorker`."""
    scorer = local(True, weight=weight, poison=poison)
    if mesh is not None:
        parallelise(scorer.model, mesh)
    say("loaded")
    return scorer


def grouped(
    make_group: Any,
    *,
    shape: ParallelShape,
    weight: float = 1.0,
    poison: str = "",
    batch_timeout: float | None = None,
) -> GroupScorer:
    """`local` in the processes of a group."""
    group = make_group(
        ScoringWorker, partial(load, weight=weight, poison=poison), shape=shape, device="cpu"
    )
    return GroupScorer(group, batch_tokens=BATCH_TOKENS, batch_timeout=batch_timeout)

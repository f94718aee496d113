"""Averages the weights of models that differ in nothing else, and measures how far they disagree.

Checkpoints of one run, and runs from the same starting point, often lie in one valley of the loss.
The average of their weights then does as well as the average of their scores, for the cost of one.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laurel.errors import ConfigError, ModelError
from laurel.models.checkpoint.card import CardFacts
from laurel.models.scoring import FILE_NAME, ScoringContract, ScoringRules
from laurel.rewards.open import load_scorer
from laurel.rewards.scorer import LocalScorer, conversation_group
from laurel.rewards.spec import ModelPlace, ScorerSpec
from laurel.types import Conversation

_OF_THE_WEIGHTS = ("mean", "std", "num_reference", "golden", "golden_dtype", "versions")
"""The entries of `scoring.json` that describe the weights, and so differ between members."""
_OF_THE_PROGRAM = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""The entries of `config.json` that do not decide what a model computes."""


def check_alike(places: Sequence[ModelPlace]) -> None:
    """Refuse models whose weights cannot be averaged, before any is loaded.

    Raises:
        ConfigError: They are fewer than two, one is named twice, or one is not on this machine.
        ModelError: They differ in architecture, tokenizer, template or scoring rules.
    """
    if len(places) < 2:
        raise ConfigError("--average takes at least two models; name more directories")
    names = [place.name for place in places]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--average: {name} is named twice (a run stands for its best step)")
        if not Path(name).is_dir():
            raise ConfigError(f"--average: {name} is no directory on this machine; download it")
    first = _described(Path(names[0]))
    for name in names[1:]:
        other = _described(Path(name))
        for what, value in first.items():
            if value == other[what]:
                continue
            keys = ""
            if isinstance(value, dict) and isinstance(other[what], dict):
                changed = [
                    k for k in {**value, **other[what]} if value.get(k) != other[what].get(k)
                ]
                keys = f" ({', '.join(sorted(changed)[:4])})"
            raise ModelError(
                f"--average: {name} has another {what}{keys} than {names[0]}, so the average of "
                "their weights means nothing. Average checkpoints of one run, or of runs that "
                "began with the same model"
            )


def _described(directory: Path) -> dict[str, Any]:
    def read(name: str) -> Any:
        path = directory / name
        try:
            return json.loads(path.read_bytes()) if path.is_file() else None
        except ValueError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    config, settings = read("config.json") or {}, read("tokenizer_config.json") or {}
    template = directory / "chat_template.jinja"
    rules = None
    if (directory / FILE_NAME).is_file():
        rules = ScoringRules.read(directory).model_dump(mode="json", exclude={*_OF_THE_WEIGHTS})
    return {
        "architecture": {k: v for k, v in config.items() if k not in _OF_THE_PROGRAM},
        "tokenizer": read("tokenizer.json"),
        "chat template": template.read_text(encoding="utf-8")
        if template.is_file()
        else settings.get("chat_template"),
        "scoring contract": rules,
    }


def average_weights(networks: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the mean of every weight by name, summed in float64 on the CPU.

    What is no floating-point number, such as a table of positions, is that of the first network.

    Raises:
        ModelError: A network has other weights, or weights that are not finite.
    """
    sums: dict[str, Tensor] = {}
    number = 0
    for network in networks:
        number += 1
        weights = network.state_dict()
        del network  # the next is loaded when this one is gone
        if number > 1 and weights.keys() != sums.keys():
            names = ", ".join(sorted(weights.keys() ^ sums.keys())[:3])
            raise ModelError(f"member {number} of the average differs in its weights: {names}")
        for name, weight in weights.items():
            value = weight.detach().to("cpu", torch.float64 if weight.is_floating_point() else None)
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ModelError(f"member {number} of the average: {name} has values not finite")
            if number == 1:
                sums[name] = value.clone()
            elif value.shape != sums[name].shape:
                raise ModelError(f"member {number} of the average: {name} has another shape")
            elif value.is_floating_point():
                sums[name] += value
            del weight, value
        weights.clear()
        gc.collect()
    return {
        k: weight_sum / number if weight_sum.is_floating_point() else weight_sum
        for k, weight_sum in sums.items()
    }


def fill_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a network these weights, each rounded once to the network's data type."""
    with torch.no_grad():
        for name, target in network.state_dict().items():
            target.copy_(weights[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAgreement:
    """How far the scores of the members of an average lie apart, on a few conversations."""

    num_models: int
    num_conversations: int
    deviation: float
    """The standard deviation of the members' scores of a conversation, mean over conversations."""
    spread: float
    """The standard deviation over conversations of the members' mean score, for comparison."""

    def __str__(self) -> str:
        return (
            f"the scores of the {self.num_models} models lie {self.deviation:.4f} apart (standard "
            f"deviation, mean over {self.num_conversations} conversations, whose scores spread by "
            f"{self.spread:.4f})"
        )


def average_reward_models(
    places: Sequence[ModelPlace],
    spec: ScorerSpec,
    conversations_for: Callable[[ScoringContract], Sequence[Conversation]],
) -> tuple[dict[str, Tensor], MemberAgreement]:
    """Load reward models one after the other; return the mean weights and their agreement.

    Each must score as it was saved. They are loaded in float32, whatever is written. Their scores
    are compared on the conversations for the contract of the first.
    """
    scores: list[list[float]] = []
    conversations: Sequence[Conversation] = ()

    def networks() -> Iterator[nn.Module]:
        nonlocal conversations
        for place in places:
            member = replace(spec, precision="float32")
            scorer = load_scorer(place, member, say=lambda text: None)
            conversations = conversations or conversations_for(scorer.contract)
            scores.append(_values(scorer, conversations))
            network = scorer.model.network
            del scorer
            yield network
            del network  # before the next is loaded
            gc.collect()

    weights = average_weights(networks())
    scores_MN = np.asarray(scores, dtype=np.float64)
    return weights, MemberAgreement(
        num_models=len(places),
        num_conversations=len(conversations),
        deviation=float(scores_MN.std(axis=0).mean()),
        spread=float(scores_MN.mean(axis=0).std()),
    )


def _values(scorer: LocalScorer, conversations: Sequence[Conversation]) -> list[float]:
    groups = [conversation_group(messages) for messages in conversations]
    values: list[float] = []
    for (score,) in scorer.score_now(groups):
        if score.value is None:
            raise ModelError(f"a member of the average gives no score: {score.failure}")
        values.append(score.value)
    return values


def facts_of_average(members: Sequence[CardFacts], places: Sequence[ModelPlace]) -> CardFacts:
    """Return the facts for the card of an average: what all members share, and no metrics.

    The metrics of a member are not those of the average, which has to be evaluated anew.
    """

    def shared(name: str) -> dict[str, Any]:
        first = getattr(members[0], name)
        return {
            key: value
            for key, value in first.items()
            if all(getattr(member, name).get(key) == value for member in members)
        }

    names = ", ".join(os.path.relpath(place.name) for place in places)
    note = f"Its weights are the mean of those of {len(places)} models: {names}."
    return members[0].model_copy(
        update={
            "metrics": {},
            "before": {},
            "data": shared("data"),
            "settings": shared("settings"),
            "notes": (*members[0].notes, note),
        }
    )

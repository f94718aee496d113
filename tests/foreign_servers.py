"""Servers that speak the protocols of other projects. Rows get scores that tell them apart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakes import WordScorer
from laurel.extensions.server import foreign
from laurel.models.scoring import ScoringContract
from laurel.rewards.preparing import Rendered, rendered_rows
from laurel.types import Message, SentTurn, group_of
from reward_servers import Answer, Asked, RewardServer

FOREIGN: tuple[str, ...] = ("vllm", "sglang", "sglang_embeddings", "openrlhf", "slime")


@dataclass(frozen=True)
class RowScorer:
    """Scores rendered conversations; NaN where a row holds the poison."""

    weight: float = 1.0
    poison_ids: frozenset[int] = frozenset()
    poison: str = ""

    def score(self, row: Rendered) -> float:
        if isinstance(row, str):
            is_poisoned = bool(self.poison) and self.poison in row
            codes: Sequence[int] = [ord(letter) for letter in row]
        else:
            is_poisoned = not self.poison_ids.isdisjoint(row)
            codes = row
        value = sum(math.sin(code * (i + 1)) for i, code in enumerate(codes)) / len(codes)
        return math.nan if is_poisoned else self.weight * value


def foreign_server(
    protocol: str, contract: ScoringContract, *, weight: float = 1.0, poison: str = ""
) -> RewardServer:
    """A server of that protocol."""
    poison_ids = contract.tokenizer(poison, add_special_tokens=False)["input_ids"] if poison else ()
    rows = RowScorer(weight=weight, poison_ids=frozenset(poison_ids), poison=poison)
    if protocol == "slime":
        return _slime(weight=weight, poison=poison)
    answer = {
        "vllm": _classify,
        "sglang": _native,
        "sglang_embeddings": _embeddings,
        "openrlhf": _get_reward,
    }[protocol]
    return RewardServer(_as_it_is, answer=lambda asked: answer(asked, rows))


def _as_it_is(number: int, asked: Asked) -> Answer:
    return Answer(change=lambda value: value)  # writes NaN as these servers do


def _scores(request: foreign.ForeignRequest, scorer: RowScorer) -> list[float]:
    rows = (rows for group in request.as_groups for rows in rendered_rows(group) or ())
    return [scorer.score(row) for row in rows]


def _classify(asked: Asked, scorer: RowScorer) -> Any:
    request = foreign.ClassifyRequest.read(asked.value)
    assert request.activated([5.0]) == [5.0]
    scores = _scores(request, scorer)
    return {"data": [{"index": index, "probs": [score]} for index, score in enumerate(scores)]}


def _native(asked: Asked, scorer: RowScorer) -> Any:
    scores = _scores(foreign.ClassifyRequest.read(asked.value), scorer)
    return [{"embedding": [score]} for score in scores]


def _embeddings(asked: Asked, scorer: RowScorer) -> Any:
    scores = _scores(foreign.EmbeddingsRequest.read(asked.value), scorer)
    return {"data": [{"index": index, "embedding": [one]} for index, one in enumerate(scores)]}


def _get_reward(asked: Asked, scorer: RowScorer) -> Any:
    return {"rewards": _scores(foreign.GetRewardRequest.read(asked.value), scorer)}


def _slime(**scorer: Any) -> RewardServer:
    words = WordScorer(**scorer)

    def score(asked: Asked) -> Any:
        (sent,) = foreign.RemoteRmRequest.read(asked.value).as_groups
        (turn,) = rendered_rows(sent) or ()
        assert isinstance(turn, SentTurn)
        said = turn.prompt
        prompt = (Message("user", said),) if isinstance(said, str) else said
        group = group_of(prompt, (turn.response,), group_id="")
        ((score,),) = asyncio.run(words.score([group]))
        return score

    def behave(number: int, asked: Asked) -> Answer | None:
        found = score(asked)
        if found.failure == "no tools":
            return Answer(status=422, body=b'{"detail": "no tools"}')
        return Answer(change=lambda _: math.nan if found.value is None else found.value)

    return RewardServer(behave, answer=lambda asked: None)

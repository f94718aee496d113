"""Servers that speak the protocols of other projects. Rows get scores that tell them apart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakes import WordScorer
from laurel.models.scoring import ScoringContract
from laurel.rewards.remote import foreign as wire
from laurel.rewards.remote.foreign import UrlProtocol
from reward_servers import Answer, Asked, RewardServer

FOREIGN: tuple[UrlProtocol, ...] = ("vllm", "sglang", "sglang_embeddings", "openrlhf", "slime")


@dataclass(frozen=True)
class RowScorer:
    """Scores rendered conversations; NaN where a row holds the poison."""

    weight: float = 1.0
    poison_ids: frozenset[int] = frozenset()
    poison: str = ""

    def score(self, row: wire.Rendered) -> float:
        if isinstance(row, str):
            is_poisoned = bool(self.poison) and self.poison in row
            codes: Sequence[int] = [ord(letter) for letter in row]
        else:
            is_poisoned = not self.poison_ids.isdisjoint(row)
            codes = row
        value = sum(math.sin(code * (i + 1)) for i, code in enumerate(codes)) / len(codes)
        return math.nan if is_poisoned else self.weight * value


def foreign_server(
    protocol: UrlProtocol, contract: ScoringContract, *, weight: float = 1.0, poison: str = ""
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


def _classify(asked: Asked, scorer: RowScorer) -> Any:
    request = wire.read_classify_request(asked.value)
    assert not request.squashed
    scores = [scorer.score(row) for row in request.rows]
    return wire.classify_reply(scores, request_id="1", created=1, model="m", num_tokens=1)


def _native(asked: Asked, scorer: RowScorer) -> Any:
    request = wire.read_classify_request(asked.value)
    scores = [scorer.score(row) for row in request.rows]
    return wire.native_classify_reply(scores, [1] * len(scores), is_list=request.is_list)


def _embeddings(asked: Asked, scorer: RowScorer) -> Any:
    request = wire.read_embeddings_request(asked.value)
    return wire.embeddings_reply(
        [scorer.score(row) for row in request.rows], model="m", num_tokens=1
    )


def _get_reward(asked: Asked, scorer: RowScorer) -> Any:
    request = wire.read_get_reward_request(asked.value)
    return wire.get_reward_reply([scorer.score(row) for row in request.rows])


def _slime(**scorer: Any) -> RewardServer:
    words = WordScorer(**scorer)

    def score(asked: Asked) -> Any:
        (group,) = wire.read_remote_rm_request(asked.value).groups
        ((score,),) = asyncio.run(words.score([group]))
        return score

    def behave(number: int, asked: Asked) -> Answer | None:
        found = score(asked)
        if found.failure == "no tools":
            return Answer(status=422, body=b'{"detail": "no tools"}')
        return Answer(change=lambda _: math.nan if found.value is None else found.value)

    return RewardServer(behave, answer=lambda asked: None)

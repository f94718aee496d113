"""Calls a reward manager that was written for verl.

Facts: verl/experimental/reward_loop/reward_manager/base.py, naive.py and verl/trainer/ppo/reward.py
at 1dda039b9. Such a class is made of `config`, `tokenizer`, `compute_score`,
`reward_router_address` and `reward_model_tokenizer`. Its `run_single` reads a `DataProto` of one
sequence, and returns `reward_score` and `reward_extra_info`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from laurel.errors import ConfigError
from laurel.extensions.reward_functions.scorer import (
    find_function,
    is_async,
    late,
    score_of_error,
    score_of_result,
)
from laurel.extensions.reward_functions.settings import VerlManagerConfig
from laurel.models.loading.pretrained import find_tokenizer
from laurel.models.spec import ModelSpec
from laurel.plugins import ManagedFunction
from laurel.rewards.remote.replica import failed
from laurel.types import Score


class Values(dict[str, Any]):
    """A mapping whose keys are attributes as well, as those of OmegaConf are."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            {key: Values(v) if isinstance(v, Mapping) else v for key, v in values.items()}
        )

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(
                f"the configuration of the manager has no key {name}; write it into "
                "function.verl.config"
            )
        return self[name]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence, as `data[0]` of a `DataProto`."""

    batch: Mapping[str, torch.Tensor]
    non_tensor_batch: Mapping[str, Any]
    meta_info: Mapping[str, Any]


class OneSequence:
    """What managers read of a `DataProto` that holds one sequence."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.batch = {name: tensor[None] for name, tensor in row.batch.items()}
        self.non_tensor_batch = {}
        for name, value in row.non_tensor_batch.items():
            self.non_tensor_batch[name] = np.empty(1, dtype=object)
            self.non_tensor_batch[name][0] = value
        self.meta_info = row.meta_info

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | slice) -> OneSequence | Row:
        if isinstance(index, slice):
            return self
        if index not in (0, -1):
            raise IndexError(f"the batch holds one sequence, and its item {index} was asked for")
        return self._row


def scored_by(
    section: VerlManagerConfig, managed: ManagedFunction
) -> Callable[[Mapping[str, Any], Any], Awaitable[tuple[Score, ...]]]:
    """Return the async function that scores a completion with the class.

    Raises:
        ConfigError: There is no such class, or it is no manager of verl.
    """
    where = f"{managed.where}.verl"
    kind = find_function(section.path, where=f"{where}.path")
    if not (isinstance(kind, type) and inspect.iscoroutinefunction(getattr(kind, "run_single", 0))):
        raise ConfigError(
            f"{where}.path={section.path} is no class with verl's `async def run_single(self, "
            "data)`; a manager of Laurel's own kind is a plug-in (docs/plugins.md)"
        )
    tokenizer = find_tokenizer(ModelSpec(name=section.tokenizer), pad_may_end=True)
    arguments = {
        "config": Values(section.config),
        "tokenizer": tokenizer,
        "compute_score": _compute_score(managed),
        "reward_router_address": managed.kwargs.get("reward_router_address"),
        "reward_model_tokenizer": managed.kwargs.get("reward_model_tokenizer"),
    }
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where}.path={section.path} cannot be made with {', '.join(arguments)}, as verl "
            f"makes it: {error}"
        ) from error
    made: dict[asyncio.AbstractEventLoop, Any] = {}

    async def scored(completion: Mapping[str, Any], call: object) -> tuple[Score, ...]:
        loop = asyncio.get_running_loop()
        if loop not in made:  # a manager keeps the event loop that it was made in
            made.clear()
            made[loop] = kind(**arguments)
        try:
            async with asyncio.timeout(managed.timeout) as clock:
                result = await made[loop].run_single(_sequence(completion, tokenizer))
        except Exception as error:  # the class may raise anything, TimeoutError too
            return (late(managed.timeout) if clock.expired() else score_of_error(error),)
        if not isinstance(result, Mapping) or "reward_score" not in result:
            return (failed("error: run_single returned no dictionary with a 'reward_score'"),)
        parts = result.get("reward_extra_info") or {}
        return (score_of_result({**parts, "score": result["reward_score"]}),)

    return scored


def _compute_score(managed: ManagedFunction) -> Callable[..., Any]:
    """Return the function with its own arguments, which go before those of a call, as in verl."""
    assert managed.function is not None
    function, kwargs = managed.function, managed.kwargs
    if is_async(function):

        async def compute(**arguments: Any) -> Any:
            return await function(**{**arguments, **kwargs})

        return compute
    return lambda **arguments: function(**{**arguments, **kwargs})


def _sequence(completion: Mapping[str, Any], tokenizer: Any) -> OneSequence:
    messages = completion["extra_info"]["prompt"]
    prompt_text = "\n".join(message["content"] for message in messages)

    def ids(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)

    # Of several turns the response has all messages since the prompt, as it has in verl.
    prompt, response = ids(prompt_text), ids(completion["response_str"])
    whole = torch.cat([prompt, response])
    batch = {"prompts": prompt, "responses": response, "input_ids": whole}
    batch["attention_mask"] = torch.ones_like(whole)
    others = {
        "data_source": completion["data_source"],
        "reward_model": {"style": "rule", "ground_truth": completion["ground_truth"]},
        "extra_info": {k: v for k, v in completion["extra_info"].items() if k != "prompt"},
        "raw_prompt": messages,
        "__num_turns__": completion["num_turns"],
    }
    return OneSequence(Row(batch, others, {"validate": completion["validate"]}))

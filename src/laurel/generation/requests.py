"""The settings of a generator, the validation of its requests, and the gate that they wait at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from laurel.config.grpo import GenerationConfig
from laurel.errors import ConfigError, DataError
from laurel.types import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """Settings of a generation engine that hold for every backend.

    The weights are passed separately, and each request has its own sampling parameters.
    """

    settings: GenerationConfig = field(default_factory=GenerationConfig)
    """The section `policy.generation` of the configuration, without its sampling parameters, which
    engines ignore."""
    max_length: int
    """Most tokens of a prompt and its completion together."""
    end_ids: tuple[int, ...]
    """Ids of the tokens that end a completion."""
    seed: int = 0
    """Seed of the engine, and of the weights of a policy from scratch; the learner uses the
    same."""
    weight_version: int = 0
    """Version of the weights that the engine starts with."""


def check_generation_request(request: GenerationRequest, *, vocab_size: int) -> None:
    """Raise an error if no engine could sample this request.

    Raises:
        DataError: The prompt has no tokens, or tokens outside the model's vocabulary.
        ConfigError: The sampling parameters or seeds are out of range.
    """
    ids_L = request.prompt_ids
    where = f"request {request.id!r}"
    if len(ids_L) == 0:
        raise DataError(f"{where}: the prompt has no token, so there is nothing to continue")
    if int(ids_L.min()) < 0 or int(ids_L.max()) >= vocab_size:
        odd = sorted({int(token) for token in ids_L if not 0 <= token < vocab_size})
        raise DataError(
            f"{where}: the prompt has token ids {odd[:5]}, but the model's vocabulary is "
            f"0 to {vocab_size - 1}; was it made by another model's tokenizer?"
        )
    negative = [seed for seed in request.seeds_G if seed < 0]
    if negative:
        raise ConfigError(f"{where}: seeds must not be negative, but there is {negative[0]}")
    _check_sampling(request.sampling, where, vocab_size)


def _check_sampling(sampling: SamplingParams, where: str, vocab_size: int) -> None:
    wrong = None
    if sampling.max_new_tokens < 1:
        wrong = f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}"
    elif not 0 <= sampling.temperature < float("inf"):
        wrong = f"temperature must be 0 or more, not {sampling.temperature}"
    elif not 0 < sampling.top_p <= 1:
        wrong = f"top_p must be above 0 and at most 1, not {sampling.top_p}"
    elif sampling.top_k is not None and sampling.top_k < 1:
        wrong = f"top_k must be at least 1, or None for all tokens, not {sampling.top_k}"
    elif "" in sampling.stop_strings:
        wrong = "stop_strings must not contain an empty string"
    elif odd := [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]:
        wrong = f"stop_token_ids {odd} are not in the model's vocabulary of {vocab_size} tokens"
    if wrong is not None:
        raise ConfigError(f"{where}: {wrong}")


class PauseGate:
    """A gate in one event loop that admits requests side by side or holds them back.

    It begins closed. While it is closed, other work can have the engine for itself.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._alone = asyncio.Lock()
        self._num_inside = 0

    def open(self) -> None:
        """Open the gate, so that waiting and new requests enter."""
        self._open.set()

    async def empty(self) -> None:
        """Wait until no request is inside the gate."""
        await self._idle.wait()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Enter the gate as a request: wait until it is open, and leave it with the context."""
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Close the gate and wait until all requests have left; the caller must open it again."""
        async with self._alone:
            self._open.clear()
            await self._idle.wait()
            yield

"""What is known of each completion under way, as columns, so that a step handles all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from laurel.engines.sampling import SamplingRows
from laurel.types import SamplingParams

if TYPE_CHECKING:
    from laurel.types import LogProbs, TokenIds

Slots = npt.NDArray[np.int64]
FIRST_WIDTH = 64


class RowTable:
    """The tokens so far, and how the next one is drawn; a slot for each completion."""

    def __init__(self, num_slots: int, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Make an empty table.

        Args:
            num_slots: Completions that fit.
            vocab_size: V.
            end_ids: Tokens that end any completion.
        """
        self._free = list(range(num_slots))[::-1]
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size
        self._stop_sets: dict[frozenset[int], int] = {}
        self._stops = np.zeros((0, vocab_size), np.bool_)
        self._stop_set = np.zeros(num_slots, np.int64)
        self._lengths = np.zeros(num_slots, np.int64)
        self._limits = np.zeros(num_slots, np.int64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._tokens = np.zeros((num_slots, FIRST_WIDTH), np.int32)
        self._logprobs = np.zeros((num_slots, FIRST_WIDTH), np.float32)
        self._uniforms = np.zeros((num_slots, FIRST_WIDTH), np.float64)
        self._generators: dict[int, np.random.Generator] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def begin(self, seed: int, sampling: SamplingParams) -> int:
        """Give a new completion a slot."""
        slot = self._free.pop()
        self._stop_set[slot] = self._set_of(self._end_ids | set(sampling.stop_token_ids))
        self._lengths[slot] = 0
        self._limits[slot] = sampling.max_new_tokens
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = min(sampling.top_k or 0, self._vocab_size)
        self._generators[slot] = np.random.Generator(np.random.Philox(seed))
        self._uniforms[slot] = self._generators[slot].random(self._uniforms.shape[1])
        return slot

    def end(self, slot: int) -> tuple[TokenIds, LogProbs]:
        """Free a slot; the completion's tokens and their log-probabilities."""
        length = self._lengths[slot]
        del self._generators[slot]
        self._free.append(slot)
        return self._tokens[slot, :length].copy(), self._logprobs[slot, :length].copy()

    def record(self, slots: Slots, tokens_N: Any, logprobs_N: Any) -> npt.NDArray[np.bool_]:
        """Add one token to each; whether it is a stop token or the last that is allowed."""
        places = self._lengths[slots]
        self._widen(int(places.max()) + 2)
        self._tokens[slots, places] = tokens_N
        self._logprobs[slots, places] = logprobs_N
        self._lengths[slots] = places + 1
        is_last: npt.NDArray[np.bool_] = self.is_stop(slots, tokens_N)
        return is_last | (places + 1 >= self._limits[slots])

    def is_stop(self, slots: Slots, tokens_N: Any) -> npt.NDArray[np.bool_]:
        """Whether each token ends its completion wherever it comes."""
        found: npt.NDArray[np.bool_] = self._stops[self._stop_set[slots], tokens_N]
        return found

    def last_tokens(self, slots: Slots) -> npt.NDArray[np.int64]:
        """The latest token of each."""
        return self._tokens[slots, self._lengths[slots] - 1].astype(np.int64)

    def next_uniforms(self, slots: Slots) -> npt.NDArray[np.float64]:
        """The numbers that decide the next tokens."""
        found: npt.NDArray[np.float64] = self._uniforms[slots, self._lengths[slots]]
        return found

    def sampling(self, slots: Slots, device: torch.device) -> SamplingRows:
        """How the next tokens are drawn. Holds as long as the slots have the same owners."""
        top_p, top_k = self._top_p[slots], self._top_k[slots]
        return SamplingRows(
            torch.from_numpy(self._temperature[slots]).to(device),
            torch.from_numpy(top_p).to(device),
            torch.from_numpy(top_k).to(device),
            tuple(np.flatnonzero((top_p < 1) | (top_k > 0)).tolist()),
            bool((self._temperature[slots] == 0).any()),
        )

    def _set_of(self, stop_ids: frozenset[int]) -> int:
        if stop_ids not in self._stop_sets:
            self._stop_sets[stop_ids] = len(self._stop_sets)
            row = np.zeros((1, self._vocab_size), np.bool_)
            row[0, [token for token in stop_ids if token < self._vocab_size]] = True
            self._stops = np.concatenate((self._stops, row))
        return self._stop_sets[stop_ids]

    def _widen(self, width: int) -> None:
        """Make room for so many tokens; the numbers of each row go on from where they were."""
        present = self._tokens.shape[1]
        if width <= present:
            return
        more = np.zeros((len(self._lengths), max(width, 2 * present) - present))
        self._tokens = np.concatenate((self._tokens, more.astype(np.int32)), axis=1)
        self._logprobs = np.concatenate((self._logprobs, more.astype(np.float32)), axis=1)
        for slot, generator in self._generators.items():
            more[slot] = generator.random(more.shape[1])
        self._uniforms = np.concatenate((self._uniforms, more), axis=1)

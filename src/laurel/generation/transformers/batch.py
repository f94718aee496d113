"""Implements continuous batching: each step samples one token of every running completion.

This is the arithmetic of the engine, without threads; `generation/transformers/engine.py` calls it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laurel.errors import EngineError
from laurel.models.forest.decoding import DecodePlan, KeptTokens, KeyValueStore
from laurel.models.forest.policy import PolicyModel, rounded_weights
from laurel.models.forest.policy import fast_matmul as fast_matmul_of
from laurel.models.tokenizer import TextStream, plain_text
from laurel.types import FinishReason, Generated, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from laurel.types import LogProbs, TokenIds


PREFILL_TOKENS = 8192
"""The maximum number of prompt tokens of one forward pass; a longer prompt is computed alone."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the batch, with counts of its begun, ended and delivered completions."""

    request: GenerationRequest
    deliver: Callable[[Generated | EngineError], None]
    """Receives each completion, or an error; called in the worker's thread."""
    num_begun: int = 0
    num_ended: int = 0
    num_delivered: int = 0
    prompt: int | None = None
    """The prompt's id in the key-value store; None while its keys and values are not stored."""
    hidden_1D: Tensor | None = None
    """The prompt's last hidden state [1, D], from which the first tokens are sampled."""
    num_cached: int = 0
    """The number of tokens of the prompt that an earlier turn had computed already."""
    copied_prompt: KeptTokens | None = None
    """A copy of the prompt's keys and values, which conversations that began with it share."""

    @property
    def num_left(self) -> int:
        """The number of completions that have not begun."""
        return len(self.request.seeds_G) - self.num_begun


@dataclass(slots=True, eq=False)
class _Row:
    ticket: Ticket
    index: int
    rest: str | None = None
    """The text after the stop string, once the completion has one."""


Finished = list[tuple[Ticket, Generated]]


class RepeatedSteps(Protocol):
    """Decoding steps of few shapes that are repeated, such as `StaticSteps`."""

    def sample(
        self, plan: DecodePlan, ids_N: Tensor, rows: SamplingRows, uniform_N: Tensor
    ) -> Tensor:
        """Sample the next token of each row; return `Sampled.joined` of the rows."""

    def clear(self) -> None:
        """Forget what was computed with weights that change."""


class ContinuousBatch:
    """The running completions of all requests, which advance together by one token per step."""

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        max_concurrent: int,
        conversation_bytes: int = 0,
        fast_matmul: bool = True,
        static: RepeatedSteps | None = None,
    ) -> None:
        """Create an empty batch; the arguments are those of `TransformersEngine`.

        Args:
            static: The decoding steps by shape; None: each has the shape that it needs.
        """
        self.model = model
        self.weight_version = 0
        self.conversations = ConversationCache(conversation_bytes)
        self._stamp_of_cached: int | None = None
        self._tokenizer = tokenizer
        self._products = fast_matmul_of if fast_matmul else nullcontext
        self._table = RowTable(max_concurrent, model.vocab_size, end_ids)
        self._store = KeyValueStore(model.device, is_static=static is not None)
        self.static = static
        """The decoding steps by shape; None: each has the shape that it needs."""
        self._rows: dict[int, _Row] = {}
        self._watches: dict[int, StopStringWatch] = {}
        self._partial: Ticket | None = None
        self._next_prompt = 0
        self._known: tuple[tuple[int, ...], Slots, SamplingRows] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self._rows and self._partial is None

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the cached keys and values of all requests."""
        return self._store.num_bytes

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Prepare the model for `admit` and `step`, and restore its state afterwards.

        Inside the context modules are in evaluation mode, autocast is on, and no gradients are
        recorded.

        Raises:
            EngineError: The weights changed inside the context.
        """
        in_training = [module for module in self.model.modules() if module.training]
        for module in in_training:
            module.training = False
        before = self._weights_stamp()
        if before != self._stamp_of_cached:  # they are of other weights
            self.conversations.clear()
        self._stamp_of_cached = before
        try:
            with (
                self.model.without_gradients(),
                self.model.autocast(),
                rounded_weights(self.model),
                self._products(self.model),
            ):
                yield
        finally:
            for module in in_training:
                module.training = True
            if self.static is not None:
                self.static.clear()  # the rounded weights are gone
        if self._weights_stamp() != before:
            raise EngineError(
                "the weights of the policy changed while completions were being sampled with them: "
                "wait for the requests to end before an optimizer step, or give the engine its own "
                "copy of the weights (shares_weights=False)"
            )

    def _weights_stamp(self) -> int:
        """Return a number that changes with every in-place change of a parameter."""
        return sum(p._version for p in self.model.parameters() if not p.is_inference())

    def admit(self, waiting: deque[Ticket]) -> Finished:
        """Begin completions while slots are free and sample their first tokens.

        Args:
            waiting: Requests in order; a request is removed when its first completion begins.

        Returns:
            The completions that end with their first token.
        """
        finished: Finished = []
        while self._table.num_free and (self._partial is not None or waiting):
            finished += self._begin(self._choose(waiting))
        return finished

    def _choose(self, waiting: deque[Ticket]) -> list[tuple[Ticket, int]]:
        """Return the next requests that fit, each with the number of its completions to begin."""
        chosen: list[tuple[Ticket, int]] = []
        num_free, num_tokens = self._table.num_free, 0
        while num_free and (self._partial is not None or waiting):
            ticket = self._partial or waiting[0]
            if self._partial is None:
                cached = self.conversations.find(ticket.request)
                num_tokens += len(ticket.request.prompt_ids) - sum(part.length for part in cached)
                if chosen and num_tokens > PREFILL_TOKENS:
                    break
                waiting.popleft()
            count = min(num_free, ticket.num_left)
            self._partial = ticket if count < ticket.num_left else None
            chosen.append((ticket, count))
            num_free -= count
        return chosen

    def _begin(self, chosen: Sequence[tuple[Ticket, int]]) -> Finished:
        self._read_prompts([ticket for ticket, _ in chosen if ticket.prompt is None])
        slots: list[int] = []
        for ticket, count in chosen:
            assert ticket.prompt is not None
            mine = [self._begin_row(ticket) for _ in range(count)]
            self._store.add_completions(ticket.prompt, mine)
            slots += mine
        hidden = [ticket.hidden_1D for ticket, count in chosen for _ in range(count)]
        slots_N = np.array(slots, np.int64)
        sampling = self._table.sampling(slots_N).to(self.model.device)
        return self._sample(torch.cat([h for h in hidden if h is not None]), slots_N, sampling)

    def _begin_row(self, ticket: Ticket) -> int:
        request = ticket.request
        slot = self._table.begin(request.seeds_G[ticket.num_begun], request.sampling)
        if request.sampling.stop_strings:
            self._watches[slot] = StopStringWatch(self._tokenizer, request.sampling.stop_strings)
        self._rows[slot] = _Row(ticket, ticket.num_begun)
        ticket.num_begun += 1
        return slot

    def _read_prompts(self, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        kept: dict[int, Sequence[KeptTokens]] = {}
        for ticket in tickets:
            ticket.prompt = self._next_prompt
            self._next_prompt += 1
            if parts := self.conversations.find(ticket.request):
                self.conversations.remove(ticket.request.conversations_G)
                kept[ticket.prompt] = parts
                ticket.num_cached = sum(part.length for part in parts)
        tickets = sorted(tickets, key=lambda ticket: ticket.prompt in kept)
        plan = self._store.add_prompts(
            {t.prompt: len(t.request.prompt_ids) for t in tickets if t.prompt is not None}, kept
        )
        ids_T = np.concatenate(
            [t.request.prompt_ids[t.num_cached :] for t in tickets], dtype=np.int64
        )
        hidden_TD = self.model.hidden_of_row(torch.from_numpy(ids_T), plan.positions_T, plan)
        for ticket, hidden_D in zip(tickets, hidden_TD[plan.last_B], strict=True):
            ticket.hidden_1D = hidden_D[None]

    def step(self) -> Finished:
        """Sample one more token of every running completion; return the completions that end."""
        plan = self._store.next_step()
        if self._known is None or self._known[0] is not plan.ids:
            slots_N = np.array(plan.ids, np.int64)
            sampling = self._table.sampling(slots_N)
            if self.static is None:
                sampling = sampling.to(self.model.device)
            self._known = (plan.ids, slots_N, sampling)
        _, slots_N, sampling = self._known
        ids_N = torch.from_numpy(self._table.last_tokens(slots_N))
        if self.static is not None:
            uniform_N = torch.from_numpy(self._table.next_uniforms(slots_N))
            return self._record(self.static.sample(plan, ids_N, sampling, uniform_N), slots_N)
        hidden_ND = self.model.hidden_of_row(ids_N, plan.positions_N, plan)
        return self._sample(hidden_ND, slots_N, sampling)

    def _sample(self, hidden_ND: Tensor, slots_N: Slots, sampling: SamplingRows) -> Finished:
        """Sample the next token of each row; return the completions that it ends, in order."""
        logits_NV = self.model.logits(hidden_ND).float()
        uniform_N = torch.from_numpy(self._table.next_uniforms(slots_N)).to(logits_NV.device)
        return self._record(sample_tokens(logits_NV, sampling, uniform_N).joined(), slots_N)

    def _record(self, sampled_2N: Tensor, slots_N: Slots) -> Finished:
        tokens, logprobs = sampled_2N.cpu()
        tokens_N, logprobs_N = tokens.numpy().astype(np.int64), logprobs.numpy()
        if not np.isfinite(logprobs_N).all():
            raise EngineError(
                "the policy's logits are not finite numbers: its weights have diverged, or a layer "
                "overflows in the precision it computes in"
            )
        is_last_N = self._table.record(slots_N, tokens_N, logprobs_N)
        if self._watches:
            is_last_N |= [
                slot in self._watches and self._says_stop(slot, token)
                for slot, token in zip(slots_N.tolist(), tokens_N.tolist(), strict=True)
            ]
        ended = slots_N[is_last_N]
        is_stop = self._table.is_stop(ended, tokens_N[is_last_N])
        return [
            self._end(slot, stopped)
            for slot, stopped in zip(ended.tolist(), is_stop.tolist(), strict=True)
        ]

    def _says_stop(self, slot: int, token: int) -> bool:
        self._rows[slot].rest = self._watches[slot].ends_with(token)
        return self._rows[slot].rest is not None

    def _end(self, slot: int, is_stop: bool) -> tuple[Ticket, Generated]:
        row = self._rows[slot]
        # A completion that was cut off is never continued; what branches off it is computed again.
        if is_stop or row.rest is not None:
            self._keep(row, slot)
        ids_L, logprobs_L = self._drop(slot)
        text = plain_text(self._tokenizer, ids_L.tolist())
        if row.rest and text.endswith(row.rest):
            text = text[: -len(row.rest)]
        reason: FinishReason = "stop" if is_stop or row.rest is not None else "length"
        return row.ticket, Generated(
            index=row.index,
            ids_L=ids_L,
            logprobs_L=logprobs_L,
            text=text,
            finish_reason=reason,
            weight_version=self.weight_version,
            num_cached=row.ticket.num_cached,
        )

    def _keep(self, row: _Row, slot: int) -> None:
        """Copy the keys and values of a completion that ends, for the next turn."""
        ticket, request = row.ticket, row.ticket.request
        if not (request.conversations_G and self.conversations.max_bytes):
            return
        assert ticket.prompt is not None
        if ticket.copied_prompt is None:
            ticket.copied_prompt = self._store.copy_prompt(ticket.prompt)
        own = self._store.copy_completion(slot)
        ids_L = np.concatenate((request.prompt_ids, self._table.tokens(slot)[: own.length]))
        self.conversations.put(
            request.conversations_G[row.index], ids_L, (ticket.copied_prompt, own)
        )

    def _drop(self, slot: int) -> Any:
        ticket = self._rows.pop(slot).ticket
        self._watches.pop(slot, None)
        self._store.remove_completion(slot)
        ticket.num_ended += 1
        self._known = None
        if ticket.num_ended == len(ticket.request.seeds_G):
            self._forget_prompt(ticket)
        return self._table.end(slot)

    def _forget_prompt(self, ticket: Ticket) -> None:
        if ticket.prompt is not None:
            self._store.remove_prompt(ticket.prompt)
        ticket.prompt = ticket.hidden_1D = ticket.copied_prompt = None

    def abort(self, ticket: Ticket) -> None:
        """Remove the unfinished completions of a request."""
        if self._partial is ticket:
            self._partial = None
        with self.model.without_gradients():
            for slot in [slot for slot, row in self._rows.items() if row.ticket is ticket]:
                self._drop(slot)
            self._forget_prompt(ticket)

    def free_memory(self) -> None:
        """Free the memory of an idle batch, its conversations, and torch's cache on the device."""
        assert self.is_idle
        self.conversations.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Remove all requests and free the memory; the batch cannot be used afterwards."""
        self._store = KeyValueStore(self.model.device, is_static=self.static is not None)
        self.conversations.clear()
        self._rows.clear()
        self._watches.clear()
        self._partial = self._known = None


# The keys and values of earlier turns of conversations that may go on.


class _Conversation(NamedTuple):
    ids_L: TokenIds
    parts: tuple[KeptTokens, ...]


class ConversationCache:
    """Keeps the keys and values of conversations between their turns, up to a limit of memory.

    Beyond the limit, the oldest are dropped. They are then computed again, so only time is lost.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start empty; with `max_bytes` 0 nothing is kept."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """The number of bytes that are kept."""
        # In the order in which they were kept: a conversation is removed for its next turn, so
        # the first has not been used for the longest time.
        self._kept: dict[str, _Conversation] = {}
        self._uses: Counter[KeptTokens] = Counter()

    def put(self, name: str, ids_L: TokenIds, parts: tuple[KeptTokens, ...]) -> None:
        """Keep a conversation.

        Args:
            name: The name of the conversation, as in `GenerationRequest.conversations_G`.
            ids_L: The tokens of the conversation that have been computed so far.
            parts: The keys and values of these tokens. Conversations may share parts.
        """
        self.remove((name,))
        # One that has no room even alone would drive out all others first.
        if sum(part.num_bytes for part in parts) > self.max_bytes:
            return
        self._kept[name] = _Conversation(ids_L, parts)
        for part in parts:
            self._uses[part] += 1
            if self._uses[part] == 1:
                self.num_bytes += part.num_bytes
        while self.num_bytes > self.max_bytes:
            self.remove((next(iter(self._kept)),))

    def find(self, request: GenerationRequest) -> tuple[KeptTokens, ...]:
        """Return the keys and values of the conversation that a request continues, or branches off.

        They are those of the first tokens of its prompt. The result is empty if none are kept.
        """
        if len(request.conversations_G) != 1:  # several begin here: none of them has had a turn
            return ()
        prompt_ids = request.prompt_ids
        if (found := self._kept.get(request.conversations_G[0])) is not None:
            length = len(found.ids_L)
            is_continued = length < len(prompt_ids) and np.array_equal(
                found.ids_L, prompt_ids[:length]
            )
            return found.parts if is_continued else ()
        if (found := self._kept.get(request.branch_of)) is None:
            return ()
        # Of the prompt's last token the hidden state is needed as well, so it is computed.
        length = min(len(found.ids_L), len(prompt_ids) - 1)
        apart = np.flatnonzero(found.ids_L[:length] != prompt_ids[:length])
        return _first(found.parts, int(apart[0]) if len(apart) else length)

    def remove(self, names: Iterable[str]) -> None:
        """Free conversations; unknown names are ignored."""
        for name in names:
            gone = self._kept.pop(name, None)
            for part in () if gone is None else gone.parts:
                self._uses[part] -= 1
                if not self._uses[part]:
                    del self._uses[part]
                    self.num_bytes -= part.num_bytes

    def clear(self) -> None:
        """Free all conversations."""
        self.remove(list(self._kept))


def _first(parts: Sequence[KeptTokens], length: int) -> tuple[KeptTokens, ...]:
    # Those of the first tokens, as views.
    found = []
    for part in parts:
        count = min(part.length, length)
        if count == part.length:
            found.append(part)
        elif count:
            cut = {n: (k[:, :count], v[:, :count]) for n, (k, v) in part.layers.items()}
            found.append(KeptTokens(length=count, layers=cut))
        length -= count
    return tuple(found)


# The state of each running completion, as columns, so that a step handles all at once.

Slots = npt.NDArray[np.int64]
FIRST_WIDTH = 64


class RowTable:
    """The tokens, log-probabilities and sampling parameters of each running completion, by slot."""

    def __init__(self, num_slots: int, vocab_size: int, end_ids: Sequence[int]) -> None:
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
        """The number of slots that hold no completion."""
        return len(self._free)

    def begin(self, seed: int, sampling: SamplingParams) -> int:
        """Assign a free slot to a new completion, and return the slot."""
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

    def tokens(self, slot: int) -> TokenIds:
        """Return the tokens of a slot's completion so far."""
        return self._tokens[slot, : self._lengths[slot]]

    def end(self, slot: int) -> tuple[TokenIds, LogProbs]:
        """Free a slot; return its completion's tokens and their log-probabilities."""
        length = self._lengths[slot]
        del self._generators[slot]
        self._free.append(slot)
        return self._tokens[slot, :length].copy(), self._logprobs[slot, :length].copy()

    def record(self, slots: Slots, tokens_N: Any, logprobs_N: Any) -> npt.NDArray[np.bool_]:
        """Append one token to each slot; return whether it ends the completion.

        A completion ends with a stop token, or at its maximum number of tokens.
        """
        places = self._lengths[slots]
        self._widen(int(places.max()) + 2)
        self._tokens[slots, places] = tokens_N
        self._logprobs[slots, places] = logprobs_N
        self._lengths[slots] = places + 1
        is_last: npt.NDArray[np.bool_] = self.is_stop(slots, tokens_N)
        return is_last | (places + 1 >= self._limits[slots])

    def is_stop(self, slots: Slots, tokens_N: Any) -> npt.NDArray[np.bool_]:
        """Return whether each token is a stop token of the completion in its slot."""
        found: npt.NDArray[np.bool_] = self._stops[self._stop_set[slots], tokens_N]
        return found

    def last_tokens(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return the latest token of each slot."""
        return self._tokens[slots, self._lengths[slots] - 1].astype(np.int64)

    def next_uniforms(self, slots: Slots) -> npt.NDArray[np.float64]:
        """Return the uniform random number that decides the next token of each slot."""
        found: npt.NDArray[np.float64] = self._uniforms[slots, self._lengths[slots]]
        return found

    def sampling(self, slots: Slots) -> SamplingRows:
        """Return the sampling parameters of the slots, as tensors on the host.

        They stay valid as long as the slots hold the same completions.
        """
        top_p, top_k = self._top_p[slots], self._top_k[slots]
        return SamplingRows(
            torch.from_numpy(self._temperature[slots]),
            torch.from_numpy(top_p),
            torch.from_numpy(top_k),
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
        """Extend the table to `width` tokens; each row's random numbers continue its sequence."""
        present = self._tokens.shape[1]
        if width <= present:
            return
        more = np.zeros((len(self._lengths), max(width, 2 * present) - present))
        self._tokens = np.concatenate((self._tokens, more.astype(np.int32)), axis=1)
        self._logprobs = np.concatenate((self._logprobs, more.astype(np.float32)), axis=1)
        for slot, generator in self._generators.items():
            more[slot] = generator.random(more.shape[1])
        self._uniforms = np.concatenate((self._uniforms, more), axis=1)


# Stop strings, which end a completion because of its text, checked token by token.


class StopStringWatch:
    """Decodes a completion token by token and detects its first stop string.

    The text omits special tokens, as in `Generated`. A stop string may span tokens, and may begin
    or end inside a token.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        """Begin before the first token of a completion.

        Args:
            tokenizer: A fast tokenizer of transformers.
            stop_strings: At least one stop string, none of them empty.
        """
        self._stream = TextStream(tokenizer)
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings))
        self._tail = ""

    def ends_with(self, token: int) -> str | None:
        """Append a token, and report whether it completes a stop string.

        Returns:
            The text after the stop string that the token completes (the one that ends first); None
            if it completes none.
        """
        new = self._stream.step(token)
        if not new:
            return None
        text = self._tail + new
        ends = [start + len(stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        self._tail = text[-self._longest :]
        return text[min(ends) :] if ends else None


# Sampling the next token of every row from its logits and its own random number.
#
# The number of a row comes from the seed of its completion. The token is the one at which the row's
# cumulative distribution passes the number (inverse transform sampling), so a completion does not
# depend on the rest of the batch.

CANDIDATES = 256
"""The number of most likely tokens that top-p sorts first. It sorts the whole vocabulary, which is
slow, only if their probabilities do not reach the share."""
NUMBERS_AT_A_TIME = 1 << 22
"""The maximum number of float64 numbers in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The sampling parameters of each row, on the device of the logits."""

    temperature_N: Tensor
    """float32 [N]; 0 selects the most likely token."""
    top_p_N: Tensor
    """float32 [N]; 1 keeps every token."""
    top_k_N: Tensor
    """int64 [N]; 0 keeps every token."""
    filtered: tuple[int, ...]
    """Indices of the rows with a `top_p` below 1 or a `top_k` above 0."""
    has_greedy: bool
    """Whether any row has temperature 0."""

    def to(self, device: torch.device) -> SamplingRows:
        """Return the same parameters on another device."""
        return replace(
            self,
            temperature_N=self.temperature_N.to(device),
            top_p_N=self.top_p_N.to(device),
            top_k_N=self.top_k_N.to(device),
        )


class Sampled(NamedTuple):
    """The sampled token of each row and its log-probability."""

    tokens_N: Tensor
    """int64 [N]: the id of each row's token."""
    logprobs_N: Tensor
    """float32 [N]: log-probabilities under `softmax(logits / temperature)`; NaN if logits are."""

    def joined(self) -> Tensor:
        """Return both as one float64 tensor [2, N], for a single copy to the host."""
        return torch.stack((self.tokens_N.double(), self.logprobs_N.double()))


def sample_tokens(logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor) -> Sampled:
    """Sample the next token of every row.

    Args:
        logits_NV: float32 [N, V], the logits, which are overwritten.
        uniform_N: float64 [N] in [0, 1): the random number that decides each row's token.
    """
    step = max(1, NUMBERS_AT_A_TIME // logits_NV.shape[1])
    parts = [
        _sample_rows(logits_NV[start : start + step], rows, uniform_N[start : start + step], start)
        for start in range(0, len(logits_NV), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return Sampled(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _sample_rows(logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor, start: int) -> Sampled:
    end = start + len(logits_NV)
    temperature_N1 = rows.temperature_N[start:end, None]
    weights_NV = logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True))
    if rows.has_greedy:
        is_greedy_N1 = temperature_N1 == 0
        likeliest_N = weights_NV.argmax(dim=1)
        temperature_N1 = temperature_N1.masked_fill(is_greedy_N1, 1.0)
    weights_NV = weights_NV.div_(temperature_N1).exp_()
    cumulative_NV = weights_NV.cumsum(dim=1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:].clone()
    filtered = [row - start for row in rows.filtered if start <= row < end]
    if filtered:
        index = torch.tensor(filtered, device=logits_NV.device)
        kept_FV = keep_likeliest(
            weights_NV[index], rows.top_k_N[start:end][index], rows.top_p_N[start:end][index]
        )
        cumulative_NV[index] = kept_FV.cumsum(dim=1, dtype=torch.float64)
    tokens_N = _where_it_passes(cumulative_NV, uniform_N[:, None])
    if rows.has_greedy:
        tokens_N = torch.where(is_greedy_N1[:, 0], likeliest_N, tokens_N)
    chosen_N1 = weights_NV.gather(1, tokens_N[:, None]).double()
    logprobs_N1 = torch.log(chosen_N1) - torch.log(total_N1)
    return Sampled(tokens_N, logprobs_N1[:, 0].float())


def _where_it_passes(cumulative_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """Return the first index of each row whose cumulative weight exceeds its share of the total.

    An entry of weight 0 is never returned.
    """
    total_N1 = cumulative_NV[:, -1:]
    # A share that rounds up to the total would point past the end.
    below_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    share_N1 = torch.minimum(uniform_N1 * total_N1, below_N1)
    passed_N1 = torch.searchsorted(cumulative_NV, share_N1.contiguous(), right=True)
    # The index is beyond the end only if weights are NaN, which the caller reports.
    return passed_N1[:, 0].clamp_max(cumulative_NV.shape[1] - 1)


def keep_likeliest(weights_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """Set the weights of all but the most likely tokens to 0 (top-k, then top-p).

    Top-p applies to the tokens that top-k keeps: it keeps the smallest number of most likely tokens
    that together reach the share. Tokens as likely as the last one are kept too.

    Args:
        weights_FV: float32 [F, V], not negative, of any sum; each row has one above 0.
        top_k_F: int64 [F]; 0 keeps all.
        top_p_F: float32 [F]; 1 keeps all.
    """
    count = min(max(CANDIDATES, int(top_k_F.max())), weights_FV.shape[1])
    best_FC = weights_FV.topk(count, dim=1).values
    total_F1 = weights_FV.sum(dim=1, keepdim=True, dtype=torch.float64)
    share_F1 = top_p_F[:, None].double()
    is_short_F1 = best_FC.sum(dim=1, keepdim=True, dtype=torch.float64) < share_F1 * total_F1
    if bool(((is_short_F1[:, 0] | (top_p_F >= 1)) & (top_k_F == 0)).any()):
        best_FC = weights_FV.sort(dim=1, descending=True).values
    has_k_F1 = top_k_F[:, None] > 0
    edge_F1 = best_FC.gather(1, (top_k_F[:, None] - 1).clamp(0, best_FC.shape[1] - 1))
    left_FC = best_FC.masked_fill(has_k_F1 & (best_FC < edge_F1), 0.0)
    cumulative_FC = left_FC.cumsum(dim=1, dtype=torch.float64)
    total_F1 = torch.where(has_k_F1, cumulative_FC[:, -1:], total_F1)
    # A token is kept while the likelier ones do not make up the share yet. To a share of 1 the
    # least likely would add less than a float64 can tell.
    is_short_FC = (cumulative_FC - left_FC < share_F1 * total_F1) | (share_F1 >= 1)
    is_kept_FC = is_short_FC & (left_FC > 0)
    last_F1 = is_kept_FC.sum(dim=1, keepdim=True) - 1
    return weights_FV.masked_fill(weights_FV < left_FC.gather(1, last_F1.clamp_min(0)), 0.0)

"""Generates in the learner's process, with an unmodified Hugging Face model.

Each prompt is computed once, and all its completions share its keys and values. The completions of
all requests are sampled together, one token of each per step; when one ends, the next takes its
slot. One thread, which the engine owns, does all of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from laurel.data.forest import bin_pack, to_forest
from laurel.errors import EngineError, ModelError
from laurel.generation.transformers.batch import ContinuousBatch, Finished, Ticket
from laurel.generation.transformers.static import StaticSteps
from laurel.generation.weights.probe import (
    ProbeAnswer,
    default_tolerance,
    fitting_ids,
    model_logprobs,
)
from laurel.models.forest.decoder import adapted_layers
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.pretrained import num_positions
from laurel.types import Generated, GenerationRequest, TokenGroup, Weights


class TransformersEngine:
    """A `Generator` that samples in this process with a transformers model.

    The tokens of a completion depend on its own seed; the rest of the batch changes
    log-probabilities only by float rounding. Requests made in the same turn of the event loop begin
    together, so a program that repeats its requests gets identical bits on a CPU.
    """

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        max_concurrent: int = 256,
        shares_weights: bool = True,
        owns_model: bool = False,
        weight_version: int = 0,
        conversation_bytes: int = 0,
        fast_matmul: bool = True,
        static_slots: Literal["auto"] | bool = "auto",
    ) -> None:
        """Create an engine that samples from a model.

        Args:
            model: The learner's model. It must support token forests.
            tokenizer: A fast tokenizer of transformers; the engine uses a copy.
            end_ids: The ids of tokens that end every completion, such as the end of a turn.
            shares_weights: Whether to sample with the learner's own weights, which must not change
                while requests are running. Otherwise the engine samples with a copy, which
                `update_weights` updates, so it can sample while the learner trains.
            owns_model: Whether the engine, without shared weights, may use the model itself instead
                of a copy, because nothing else uses it.
            conversation_bytes: The maximum number of bytes of keys and values of conversations that
                are kept between turns. With 0, every turn is computed from the first token of its
                prompt.
            fast_matmul: Whether to multiply with the faster of torch's two CPU libraries
                (`fast_matmul`), rather than with the one that the learner uses.
            static_slots: Whether decoding steps have few shapes, each of which a CUDA graph
                repeats; `auto`: on a GPU, unless the model is sharded.

        Raises:
            ModelError: The model does not support generation with this engine.
        """
        if model.path != "forest":
            raise ModelError(
                "the transformers engine needs a model that reads token forests, and this one was "
                "loaded for padded rows; set policy.generation.backend to vllm"
            )
        self._held = None if shares_weights else HeldWeights(model, owns_model=owns_model)
        policy = self._held.model if self._held else model
        is_static = chooses_static_slots(static_slots, policy)
        self._batch = ContinuousBatch(
            policy,
            copy.deepcopy(tokenizer),
            end_ids=end_ids,
            max_concurrent=max_concurrent,
            conversation_bytes=conversation_bytes,
            fast_matmul=fast_matmul,
            static=StaticSteps(policy) if is_static else None,
        )
        self._batch.weight_version = weight_version
        self._vocab_size = model.vocab_size
        self._worker = GenerationWorker(self._batch)
        self._finalizer = weakref.finalize(self, self._worker.close)

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token is sampled with."""
        return self._batch.weight_version

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Stream the completions of a request, each as it ends.

        Closing the iterator waits until the request has left the batch.

        Raises:
            DataError: The prompt has no tokens, or tokens outside the model's vocabulary.
            ConfigError: The sampling parameters or seeds are out of range.
        """
        request.check(self._vocab_size)
        return self._completions(request)

    async def _completions(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        if not request.seeds_G:
            return
        inbox: asyncio.Queue[Generated | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, lambda item: _tell(loop, inbox.put_nowait, item))
        self._worker.arrive(ticket)
        loop.call_soon(self._worker.hand_over)
        try:
            for _ in request.seeds_G:
                item = await inbox.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            gone: asyncio.Future[None] = loop.create_future()
            self._worker.abort(ticket, lambda: _tell(loop, _settle, gone))
            await gone

    def end_conversations(self, names: Sequence[str]) -> None:
        """Free the keys and values of conversations that have ended."""
        self._worker.end_conversations(names)

    async def update_weights(self, weights: Weights) -> None:
        """Load new weights into the engine's copy; with shared weights, set only the version.

        Raises:
            EngineError: The names or shapes are not those of this model, and the engine is unusable
                now.
        """

        def work() -> None:
            if self._held is not None and weights.same_as != self._batch.weight_version:
                self._held.take(weights)
            # Also of the same weights: what is sampled next must not depend on what was sampled
            # before, which a resumed run does not know.
            self._batch.conversations.clear()
            self._batch.weight_version = weights.version

        await self._do(work)

    async def answer_probe(self) -> ProbeAnswer:
        """Compute log-probabilities of fixed test tokens (the probe) with the current weights."""
        model = self._batch.model
        ids_L = fitting_ids(self._vocab_size, max_length=num_positions(model.causal_lm.config))
        precision = str(model.precision).removeprefix("torch.")
        answers: list[ProbeAnswer] = []

        def work() -> None:
            tolerance = default_tolerance(precision, precision)
            answers.append(ProbeAnswer(ids_L, model_logprobs(model, ids_L), tolerance))

        await self._do(work)
        return answers[0]

    async def branch_logprobs(
        self, groups: Sequence[TokenGroup], *, batch_tokens: int
    ) -> list[list[float]]:
        """Compute the log-probability of each branch after its trunk; nothing is sampled.

        Args:
            groups: Trunks of at least one token, whose tokens are in the model's vocabulary.
            batch_tokens: The most tokens of one forward pass; a larger group is computed in parts.

        Returns:
            For each group the natural log-probability of each branch, [G]: the sum over its tokens,
                each in float32, at temperature 1.

        Raises:
            EngineError: A forward pass failed, or the engine is closed.
        """
        model = self._batch.model
        sums: list[list[float]] = [[] for _ in groups]
        failures: list[Exception] = []

        def compute() -> None:
            with model.at_temperature(1.0):
                for part in bin_pack([group.num_tokens for group in groups], batch_tokens):
                    chosen = [groups[index] for index in part]
                    forest = replace(to_forest(chosen), part_tokens=batch_tokens)
                    logprobs = iter(model.logprobs(forest).cpu().tolist())
                    for index, group in zip(part, chosen, strict=True):
                        sums[index] = [
                            math.fsum(islice(logprobs, len(branch)))
                            for branch in group.branches_ids_G
                        ]

        def work() -> None:
            # Nothing of the engine changes here: what this call lacks, such as memory, need not
            # end the thread and with it every later call.
            try:
                compute()
            except Exception as error:
                failures.append(error)

        await self._do(work)
        for error in failures:
            raise EngineError(
                f"the log-probabilities of {len(groups)} questions failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        return sums

    async def sleep(self) -> None:
        """Wait for running requests, then release device memory."""
        self._worker.set_asleep(True)
        await self._do(self._batch.free_memory)

    async def wake(self) -> None:
        """Allocate device memory again and resume requests."""
        self._worker.set_asleep(False)

    async def _do(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._worker.submit(work, lambda error: _tell(loop, _settle, done, error))
        await done

    def close(self) -> None:
        """End the engine; open requests get an `EngineError`.

        The call blocks until the current decoding step has ended.
        """
        self._finalizer()


def chooses_static_slots(asked: Literal["auto"] | bool, model: PolicyModel) -> bool:
    """Return whether the decoding steps of a model are rounded to few shapes.

    `auto` does so on GPUs, unless the model is sharded, whose collectives no graph was tried with.
    On a CPU the filling costs time, and launches do not.
    """
    if asked != "auto":
        return asked
    return model.device.type == "cuda" and model.mesh is None


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *values: Any) -> None:
    """Call a function in a loop's thread; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *values)


def _settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if future.done():  # the waiting task has been cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# The thread that samples, which receives requests and delivers completions.


Done = Callable[[BaseException | None], None]
"""Receives the error of a job, or None; called in the worker's thread."""


class GenerationWorker:
    """Runs a batch in its own thread, which starts with the first request.

    Jobs run before requests that have not begun. The callbacks `done` and `deliver` must not block.
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        """Take a batch, which nothing else may use from now on."""
        self._batch = batch
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._arriving: list[Ticket] = []
        self._waiting: deque[Ticket] = deque()
        self._jobs: deque[tuple[Callable[[], None], Done]] = deque()
        self._aborts: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._ended: list[str] = []
        self._open: set[Ticket] = set()
        self._is_asleep = False
        self._end: EngineError | None = None
        """The error for requests after the end; None while the worker runs."""
        self._thread: threading.Thread | None = None
        self._gone: deque[Callable[[], None]] = deque()
        """Callbacks to call as soon as the model is free; only the thread uses them."""

    def arrive(self, ticket: Ticket) -> None:
        """Register a request; it begins at the next `hand_over`."""
        with self._changed:
            self._check_alive()
            self._arriving.append(ticket)
            self._open.add(ticket)

    def hand_over(self) -> None:
        """Begin all registered requests together, in order."""
        with self._changed:
            self._waiting.extend(self._arriving)
            self._arriving.clear()
            self._wake_up()

    def abort(self, ticket: Ticket, gone: Callable[[], None]) -> None:
        """Abort a request; call `gone` when it has left the batch."""
        with self._changed:
            if ticket in self._open and self._end is None:
                self._aborts.append((ticket, gone))
                self._wake_up()
                return
        gone()

    def end_conversations(self, names: Sequence[str]) -> None:
        """Free the keys and values of these conversations at the next step."""
        with self._changed:
            self._ended += names
            if self._thread is not None:
                self._changed.notify_all()

    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Queue a job, which runs when no request is running; `done` receives its error, if any."""
        with self._changed:
            self._check_alive()
            self._jobs.append((work, done))
            self._wake_up()

    def set_asleep(self, is_asleep: bool) -> None:
        """Stop admitting requests, or admit them again."""
        with self._changed:
            self._check_alive()
            self._is_asleep = is_asleep
            self._wake_up()

    def close(self) -> None:
        """End the thread; every open request gets an `EngineError`. Further calls do nothing."""
        with self._changed:
            if self._end is None:
                self._end = EngineError("the generator was closed")
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            self._finish()
        elif thread is not threading.current_thread():
            thread.join()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineError(str(self._end)) from self._end.__cause__

    def _wake_up(self) -> None:
        if self._thread is None and self._end is None:
            self._thread = threading.Thread(target=self._run, name="laurel-generation", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_jobs()
                self._generate()
        except BaseException as error:  # every waiting request must get an answer
            ended = error
            if not isinstance(ended, EngineError):
                ended = EngineError(f"the generator died of {type(error).__name__}: {error}")
                ended.__cause__ = error
            with self._changed:
                self._end = ended
        self._finish()

    def _wait(self) -> bool:
        """Wait for work; return False when the thread must end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._end or self._jobs or self._aborts or self._ended or self._may_begin()
            )
            return self._end is None

    def _may_begin(self) -> bool:
        return bool(self._waiting) and not self._is_asleep and not self._jobs

    def _do_jobs(self) -> None:
        while True:
            with self._changed:
                if not self._jobs or self._end is not None:
                    return
                work, done = self._jobs.popleft()
            try:
                work()
            except BaseException as error:
                done(error)
                raise
            done(None)

    def _generate(self) -> None:
        """Sample until no request is running.

        The last completions are delivered after the model's state is restored, because their
        receiver may train it.
        """
        self._take_aborts()
        finished: Finished = []
        if self._has_work():
            with self._batch.drawing():
                while self._has_work():
                    self._tell(finished)
                    finished = self._advance()
                    self._take_aborts()
        self._tell(finished)

    def _has_work(self) -> bool:
        with self._changed:
            return self._end is None and (not self._batch.is_idle or self._may_begin())

    def _advance(self) -> Finished:
        """Begin the completions that fit, and sample one more token of each."""
        with self._changed:
            candidates = deque(self._waiting if self._may_begin() else ())
        num_candidates = len(candidates)
        finished = self._batch.admit(candidates)
        with self._changed:
            for _ in range(num_candidates - len(candidates)):
                self._waiting.popleft()  # only this thread takes anything out
        if not self._batch.is_idle:
            finished += self._batch.step()
        return finished

    def _tell(self, finished: Finished) -> None:
        for ticket, generated in finished:
            ticket.num_delivered += 1
            if ticket.num_delivered == len(ticket.request.seeds_G):
                with self._changed:
                    self._open.discard(ticket)
            ticket.deliver(generated)
        while self._gone:
            self._gone.popleft()()

    def _take_aborts(self) -> None:
        with self._changed:
            aborts = list(self._aborts)
            self._aborts.clear()
            ended, self._ended = self._ended, []
            for ticket, gone in aborts:
                self._gone.append(gone)
                self._open.discard(ticket)
                if ticket in self._arriving:
                    self._arriving.remove(ticket)
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
        for ticket, _ in aborts:
            self._batch.abort(ticket)
        self._batch.conversations.remove(ended)

    def _finish(self) -> None:
        """Fail every open request and job."""
        self._take_aborts()
        with self._changed:
            assert self._end is not None
            message, cause = str(self._end), self._end.__cause__
            left, jobs = list(self._open), list(self._jobs)
            self._open.clear()
            self._jobs.clear()
            self._arriving.clear()
            self._waiting.clear()

        def error() -> EngineError:
            mine = EngineError(message)
            mine.__cause__ = cause
            return mine

        self._tell([])
        for ticket in left:
            ticket.deliver(error())
        for _, done in jobs:
            done(error())
        self._batch.clear()


# A copy of the policy for generation, and its updates.


class HeldWeights:
    """A copy of the policy without adapters, gradients or dropout, updated by `take`."""

    def __init__(self, model: PolicyModel, *, owns_model: bool = False) -> None:
        """Copy a model.

        Args:
            model: The learner's model, or one that nothing else uses.
            owns_model: Whether nothing else uses the model, so that it is copied only if it has
                adapters.

        Raises:
            ModelError: transformers saves the model's weights in another layout than in memory.
        """
        is_taken = owns_model and not adapted_layers(model.causal_lm)
        self.model = model if is_taken else copy.deepcopy(model)
        for name, layer in adapted_layers(self.model.causal_lm).items():
            parent, _, child = name.rpartition(".")
            setattr(self.model.causal_lm.get_submodule(parent), child, layer.base_layer)
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.requires_grad_(False)
        self.model.eval()
        self._check_in_place()
        self._has_all = False
        """Whether every weight was copied once, so that later versions may bring only some."""
        if not is_taken:
            self.take(Weights(version=0, tensors=model.named_weights))

    def _check_in_place(self) -> None:
        held = {t.untyped_storage().data_ptr() for t in self.model.state_dict().values()}
        for name, tensor in self._targets().items():
            if tensor.untyped_storage().data_ptr() not in held:
                raise ModelError(
                    f"{name} is saved otherwise than it is held in memory, so a copy of this model "
                    "cannot be brought up to date: set grpo.max_staleness to 0, or "
                    "policy.generation.backend to vllm"
                )

    def _targets(self) -> dict[str, Tensor]:
        return dict(self.model.named_weights())

    def take(self, weights: Weights) -> None:
        """Copy new weights by name; after the first copy, those that training changes suffice.

        Raises:
            EngineError: A weight is missing, or has a name or shape that the model lacks. Some
                weights may be replaced already.
        """
        left = self._targets()
        changing = weights.changing if self._has_all else None
        self._has_all = False
        with torch.no_grad():
            for name, tensor in (changing or weights.tensors)():
                target = left.pop(name, None)
                if target is None:
                    raise EngineError(
                        f"version {weights.version} of the weights has {name!r} twice, or the "
                        "generator's model does not have it"
                    )
                if target.shape != tensor.shape:
                    raise EngineError(
                        f"version {weights.version} of the weights has {name!r} in the shape "
                        f"{tuple(tensor.shape)}; the generator's model has {tuple(target.shape)}"
                    )
                target.copy_(tensor)
        if left and changing is None:
            raise EngineError(
                f"version {weights.version} of the weights lacks {len(left)} of the model's, such "
                f"as {next(iter(left))!r}"
            )
        self._has_all = True

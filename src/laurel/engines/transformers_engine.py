"""The generator inside the learner's process, on a Hugging Face model that nobody had to rewrite.

Every prompt is computed once for all its completions, and they share its keys and values. The
completions of all requests are drawn together, one token of each in a step; one that ends gives its
place to the next. All of it happens in one thread of the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from laurel.engines.continuous_batch import ContinuousBatch, Ticket
from laurel.engines.generation_worker import GenerationWorker, Job
from laurel.engines.held_weights import HeldWeights
from laurel.engines.requests import check_request
from laurel.engines.weight_probe import (
    ProbeAnswer,
    default_tolerance,
    fitting_ids,
    model_logprobs,
)
from laurel.errors import EngineError, ModelError
from laurel.models.policy import PolicyModel
from laurel.models.pretrained import num_positions
from laurel.types import Generated, GenerationRequest, Weights


class TransformersEngine:
    """A `Generator` in this process.

    Tokens depend on a completion's own seed; what else is being drawn changes log-probabilities by
    float rounding only. Requests made in the same turn of the event loop begin together, so a
    program that asks the same way again gets the same bits on a CPU.
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
        quick_products: bool = True,
    ) -> None:
        """Draw from a model.

        Args:
            model: The learner's own. It must read token forests.
            tokenizer: A fast one of transformers; the engine uses a copy.
            end_ids: Tokens that end every completion, such as the end of a turn.
            max_concurrent: Completions that are drawn side by side, at most.
            shares_weights: Draw with the learner's weights themselves: they must not change while
                requests are under way. Otherwise the engine has a copy, which `update_weights`
                brings up to date, so that it can draw while the learner trains.
            owns_model: Without shared weights: nobody else has the model, so that it need not be
                copied.
            weight_version: Of the weights as they are now.
            quick_products: Multiply with the quicker of torch's two CPU libraries, where they
                differ (`cpu_products`); otherwise with the one that the learner uses.

        Raises:
            ModelError: The model cannot be served.
        """
        if model.path != "forest":
            raise ModelError(
                "the transformers engine needs a model that reads token forests, and this one was "
                "loaded for padded rows; set policy.generation.backend to vllm"
            )
        self._held = None if shares_weights else HeldWeights(model, owns_model=owns_model)
        self._batch = ContinuousBatch(
            self._held.model if self._held else model,
            copy.deepcopy(tokenizer),
            end_ids=end_ids,
            max_concurrent=max_concurrent,
            quick_products=quick_products,
        )
        self._batch.weight_version = weight_version
        self._vocab_size = model.vocab_size
        self._worker = GenerationWorker(self._batch)
        self._finalizer = weakref.finalize(self, self._worker.close)

    @property
    def weight_version(self) -> int:
        """See `Generator`."""
        return self._batch.weight_version

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """See `Generator`. What closes the iterator waits until the request takes no part any more.

        Raises:
            DataError: The prompt has no tokens, or tokens that the model does not know.
            ConfigError: The sampling parameters or seeds are out of range.
        """
        check_request(request, vocab_size=self._vocab_size)
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

    async def update_weights(self, weights: Weights) -> None:
        """See `Generator`. With shared weights only the version changes.

        Raises:
            EngineError: The weights are not those of this model. The engine is of no use then.
        """

        def work() -> None:
            if self._held is not None and weights.same_as != self._batch.weight_version:
                self._held.take(weights)
            self._batch.weight_version = weights.version

        await self._do(work)

    async def answer_probe(self) -> ProbeAnswer:
        """See `Provable`."""
        model = self._batch.model
        ids_L = fitting_ids(self._vocab_size, max_length=num_positions(model.causal_lm))
        precision = str(model.precision).removeprefix("torch.")
        answers: list[ProbeAnswer] = []

        def work() -> None:
            tolerance = default_tolerance(precision, precision)
            answers.append(ProbeAnswer(ids_L, model_logprobs(model, ids_L), tolerance))

        await self._do(work)
        return answers[0]

    async def sleep(self) -> None:
        """See `Generator`. Waits for the requests that are under way."""
        self._worker.set_asleep(True)
        await self._do(self._batch.free_memory)

    async def wake(self) -> None:
        """See `Generator`."""
        self._worker.set_asleep(False)

    async def _do(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._worker.submit(Job(work, lambda error: _tell(loop, _settle, done, error)))
        await done

    def close(self) -> None:
        """See `Generator`. Open requests get an `EngineError`; at most one step is waited for."""
        self._finalizer()


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *values: Any) -> None:
    """Call a function in a loop's thread; nobody listens where the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *values)


def _settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if future.done():  # whoever waited has been cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)

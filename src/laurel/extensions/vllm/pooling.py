"""A reward model in vLLM's processes: it reads token ids and returns the outputs of its head.

Written against vLLM 0.32, which applies an activation to the head's outputs unless a setting
forbids it, and chooses by the model which hidden state it reads. Laurel sets both in every place
that vLLM has for them, and the caller checks with known scores that vLLM obeys.

On a CPU the model runs eagerly, and `sleep` does nothing: vLLM releases memory on GPUs only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from laurel.errors import DataError, LaurelError
from laurel.extensions.vllm.processes import VllmProcesses
from laurel.extensions.vllm.settings import WORKER, cpu_arguments
from laurel.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """The devices on which vLLM runs a reward model."""

    tensor_parallel_size: int = 1
    """Number of GPUs that one copy of the model is split over."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory that vLLM takes."""
    may_sleep: bool = False
    """Whether `sleep` releases GPU memory; enabling it takes some time at the start."""


class VllmPooling(VllmProcesses):
    """Computes the outputs of a classifier's head in vLLM. Any thread may call it.

    vLLM spawns processes, so a program that makes one needs the usual `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        options: PoolingOptions,
        max_length: int,
        batch_tokens: int,
        reads_last: bool,
    ) -> None:
        """Start vLLM with a reward model.

        Args:
            model: A classifier; `precision` is the dtype of its weights and of the decoder's
                arithmetic, and the head computes in float32.
            max_length: Most tokens of a conversation.
            batch_tokens: Most tokens of one forward pass; raised to `max_length` if that is larger.
            reads_last: True: the score is read from the last token. False: the model pools by
                itself.

        Raises:
            MissingDependencyError: vLLM is not installed.
            EngineError: vLLM does not start; the message has the reason that vLLM gives.
        """
        super().__init__("A reward model in vLLM")
        self._max_length = max_length
        pooler = {"seq_pooling_type": "LAST"} if reads_last else {}

        def arguments() -> dict[str, Any]:
            self._parameters = self._vllm.PoolingParams(task="classify", use_activation=False)
            return {
                "model": model.name,
                "runner": "pooling",
                "convert": "classify",
                "skip_tokenizer_init": True,
                "dtype": model.precision,
                "tensor_parallel_size": options.tensor_parallel_size,
                "gpu_memory_utilization": options.gpu_memory_utilization,
                "revision": model.revision,
                "trust_remote_code": model.trust_remote_code,
                "load_format": "safetensors" if model.safetensors_only else "auto",
                "hf_overrides": dict(model.config_overrides),
                "worker_extension_cls": WORKER,
                "disable_log_stats": True,
                "use_tqdm_on_load": False,
                "max_model_len": max_length,
                "max_num_batched_tokens": max(max_length, batch_tokens),
                "enable_sleep_mode": options.may_sleep and not self._on_cpu,
                "enforce_eager": self._on_cpu,
                "pooler_config": self._vllm.PoolerConfig(**pooler, use_activation=False),
                # A model that reads in both directions computes a prompt anew for each answer.
                **({"enable_prefix_caching": True} if reads_last else {}),
                **(cpu_arguments() if self._on_cpu else {}),
            }

        self._start("laurel-vllm-pooling", f"the reward model {model.name}", arguments)

    async def _prepare(self) -> None:
        self.vocab_size = int(self._llm.model_config.get_vocab_size())

    def submit(self, rows: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """Start to compute the head's outputs for some conversations, given as token ids.

        The future's result is float32 `[N, K]`, in the order of the rows. Common prefixes of rows
        are computed once, by blocks, also across calls. Cancelling the future cancels the
        computation. Errors of the future:

        - `DataError`: vLLM refuses a conversation.
        - `EngineError`: vLLM died, failed or was closed.

        Raises:
            DataError: A row is empty, too long, or has tokens outside the vocabulary.
            EngineError: vLLM was closed.
        """
        for row in rows:
            self._check(row)
        return self._background.submit(self._values(rows))

    def _check(self, row: Sequence[int]) -> None:
        # vLLM 0.32 looks ids up unchecked where it has no tokenizer of its own, and dies of one
        # that there is not.
        if not 0 < len(row) <= self._max_length:
            raise DataError(
                f"a conversation of {len(row)} tokens; vLLM was started for 1 to {self._max_length}"
            )
        if min(row) < 0 or max(row) >= self.vocab_size:
            strange = next(token for token in row if not 0 <= token < self.vocab_size)
            raise DataError(f"token {strange} is not among the {self.vocab_size} of the model")

    async def _values(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._value(row)) for row in rows]
        except BaseExceptionGroup as group:
            raise self._as_error(group.exceptions[0]) from group
        return np.stack([task.result() for task in pending])

    async def _value(self, ids: Sequence[int]) -> np.ndarray:
        answer = await self._answer(self._llm.encode, ids, self._parameters)
        values_K: np.ndarray = answer.outputs.data.float().numpy()
        return values_K

    def _as_error(self, error: BaseException) -> LaurelError:
        if isinstance(error, self._vllm.VLLMClientError):
            return DataError(f"vLLM refuses a conversation: {error}")
        return super()._as_error(error)

    def sleep(self) -> None:
        """Release GPU memory and keep the weights on the host.

        Nothing may be submitted until `wake`.
        """
        self._background.wait_for(self._set_memory(is_given_back=True))

    def wake(self) -> None:
        """Bring the weights back to the GPUs after `sleep`."""
        self._background.wait_for(self._set_memory(is_given_back=False))

"""A saved reward model in vLLM as a Scorer, and the proof that vLLM scores as the model should.

vLLM gives the sigmoid of a score unless it is told not to, and reads the hidden state where the
model's class says. A word that it has renamed would go unheeded without an error, so the golden
scores of the contract are recomputed before the first score is believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path as FilePath

import numpy as np

from laurel.errors import ModelError, ScoringContractError, key_of
from laurel.generation.vllm.pooling import PoolingOptions, VllmPooling
from laurel.models.forest.decoder import Path
from laurel.models.scoring import ScoringContract
from laurel.rewards.remote.foreign import sigmoid
from laurel.rewards.scorer import (
    ContractScorer,
    OnBatch,
    check_golden_by,
    golden_tolerance,
)
from laurel.types import TokenGroup


class VllmScorer(ContractScorer):
    """Scores groups with a model that vLLM holds in processes of its own.

    Once vLLM has died every call raises `EngineError`; make another one.
    """

    has_exact_scores = False

    def __init__(
        self,
        model: str | FilePath,
        contract: ScoringContract,
        *,
        options: PoolingOptions | None = None,
        batch_tokens: int = 8192,
    ) -> None:
        """Start vLLM, which takes seconds, and check its scores; `close` ends it.

        Args:
            model: Hugging Face directory of a classifier, or its name on the hub.
            contract: Of that model, with golden scores.
            options: How vLLM is to hold it.
            batch_tokens: Token budget of one forward pass.

        Raises:
            MissingDependencyError: vLLM is not installed.
            EngineError: vLLM does not start.
            ModelError: The tokenizer has tokens that the model does not embed.
            ScoringContractError: There are no golden scores, or vLLM gives others.
        """
        super().__init__(contract, batch_tokens=batch_tokens, batch_size=None)
        rules = contract.rules
        if not rules.golden:
            raise ScoringContractError(
                f"{model} has no golden scores, so nothing would show whether vLLM gives its "
                "scores; `load_vllm_scorer` computes some with Hugging Face's own class"
            )
        options = options or PoolingOptions()
        self._dtype = options.precision
        self._model = VllmPooling(
            model,
            options=options,
            max_length=rules.max_length,
            batch_tokens=batch_tokens,
            reads_last=rules.pooled == "last",
        )
        try:
            self._check_vocabulary()
            self.golden_difference = self._check_golden()
            """Largest difference from a golden score, in units of max(1, |score|)."""
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """See `ContractScorer`. As in a forest, a prompt is computed once for its group."""
        return "forest"

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        if exactly:
            raise ModelError(
                "vLLM holds a reward model in one precision and cannot score in a higher one; let "
                "Laurel's own engine measure the noise of its scores"
            )
        started = [self._model.submit(_rows(group)) for group in tokens]
        values = []
        try:
            for group, future in zip(tokens, started, strict=True):
                values.append(_of_group(future, self._num_outputs))
                if on_batch is not None:
                    on_batch(1, group.num_tokens)
        finally:
            for future in started:
                future.cancel()
        return np.concatenate(values) if values else np.empty((0, self._num_outputs), np.float32)

    def sleep(self) -> None:
        """See `ContractScorer`. On a CPU vLLM keeps its memory."""
        self._model.sleep()

    def wake(self) -> None:
        """See `ContractScorer`."""
        self._model.wake()

    def close(self) -> None:
        """End vLLM's processes. A call under way gets an `EngineError`. Idempotent."""
        self._model.close()

    @property
    def _num_outputs(self) -> int:
        return len(self.contract.rules.golden[0].values_K)

    def _check_vocabulary(self) -> None:
        known = len(self.contract.tokenizer)
        if known > self._model.vocab_size:
            raise ModelError(
                f"the tokenizer has {known} tokens and the model embeds {self._model.vocab_size}: "
                f"they do not belong together ({key_of('policy.tokenizer.name')})"
            )

    def _check_golden(self) -> float:
        tolerance = golden_tolerance(self.contract, self._dtype)
        return check_golden_by(
            lambda tokens: self._values(tokens, None, exactly=False),
            self.contract,
            dtype=self._dtype,
            why=lambda values_K, expected_K: _cause(values_K, expected_K, tolerance),
        )


def _rows(group: TokenGroup) -> list[list[int]]:
    """Each conversation whole: vLLM finds the prompt that they share by itself."""
    trunk = group.trunk_ids.tolist()
    return [trunk + branch.tolist() for branch in group.branches_ids_G]


def _of_group(future: Future[np.ndarray], num_outputs: int) -> np.ndarray:
    values_NK = future.result()
    if values_NK.shape[1] != num_outputs:
        raise ScoringContractError(
            f"vLLM gives {values_NK.shape[1]} numbers for a conversation and the model gave "
            f"{num_outputs} when it was saved"
        )
    return values_NK


def _cause(values_K: Sequence[float], expected_K: Sequence[float], tolerance: float) -> str:
    """What most likely made vLLM's scores others than they should be."""
    largest = max(expected_K)
    exponentials_K = [math.exp(value - largest) for value in expected_K]
    squashed = {
        "sigmoid": [sigmoid(value) for value in expected_K],
        "softmax": [value / sum(exponentials_K) for value in exponentials_K],
    }
    for name, squashed_K in squashed.items():
        if np.allclose(values_K, squashed_K, rtol=0, atol=tolerance):
            return (
                f"this is the {name} of the score: vLLM applied an activation although it was told "
                "not to (use_activation=False). Use the version of vLLM that Laurel names"
            )
    return (
        "vLLM may have read it at another position than the last token, have calibrated it "
        "(logit_mean, logit_sigma), or compute this architecture differently. Look for files of "
        "its pooling beside the model (modules.json, config_sentence_transformers.json), or use "
        "Laurel's own engine"
    )

"""A saved reward model in vLLM as a Scorer, and the proof that vLLM scores as the model should.

vLLM gives the sigmoid of a score unless it is told not to, and reads the hidden state where the
model's class says. A word that it has renamed would go unheeded without an error, so the golden
scores of the contract are recomputed before the first score is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np

from laurel.errors import ModelError, ScoringContractError, UserError, key_of
from laurel.generation.vllm.pooling import PoolingOptions, VllmPooling
from laurel.models.forest.decoder import Path
from laurel.models.loading.pretrained import find_tokenizer
from laurel.models.scoring import ScoringContract
from laurel.rewards.open import ModelPlace, ScorerSpec, load_scorer, read_rules
from laurel.rewards.remote.foreign import sigmoid
from laurel.rewards.remote.router import CANARY
from laurel.rewards.scorer import (
    ContractScorer,
    OnBatch,
    check_golden_by,
    golden_scores,
    golden_tolerance,
)
from laurel.types import TokenGroup

Say = Callable[[str], None]


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


def load_vllm_scorer(
    place: ModelPlace,
    spec: ScorerSpec,
    *,
    say: Say,
    pooling: PoolingOptions | None = None,
) -> VllmScorer:
    """Start vLLM with a reward model, and check that it scores as it did when it was saved.

    A model that brings no golden scores is loaded by Hugging Face's own class first, which computes
    some; its memory is free again before vLLM starts.

    Args:
        place: Where it is; see `find_model` and `check_files`.
        spec: How it is to score. vLLM chooses the device.
        say: Told what was loaded and found.
        pooling: Options of vLLM. Those that `spec` has too are taken from `spec`.

    Raises:
        UserError: Not a reward model, or not the one it was; or vLLM is not installed.
        EngineError: vLLM does not start.
    """
    contract = _contract_of(place, spec, say)
    try:
        scorer = VllmScorer(
            place.name,
            contract,
            options=_as_asked(pooling or PoolingOptions(), spec),
            batch_tokens=spec.batch_tokens,
        )
    except UserError as error:
        raise type(error)(f"{place.name} in vLLM: {error}") from error
    rules = contract.rules
    say(f"model   {place.name} in vLLM, {spec.precision}")
    say(f"checked golden scores agree (max difference {scorer.golden_difference:.1e})")
    say(
        f"lengths conversations of more than {rules.max_length:,} tokens are cut on the "
        f"{rules.truncation_side}"
    )
    if rules.attributes:
        say(f"values  {', '.join(rules.attributes)}")
    return scorer


def _as_asked(pooling: PoolingOptions, spec: ScorerSpec) -> PoolingOptions:
    return replace(
        pooling,
        precision=spec.precision,
        revision=spec.model.revision,
        trust_remote_code=spec.model.trust_remote_code,
        safetensors_only=spec.model.safetensors_only,
        config_overrides=spec.model.config_overrides,
    )


def _contract_of(place: ModelPlace, spec: ScorerSpec, say: Say) -> ScoringContract:
    """The contract that was saved with a model, or a new one; with golden scores."""
    rules = read_rules(place)
    if rules is not None and rules.golden:
        tokenizer = find_tokenizer(replace(spec.model, name=place.name))
        return ScoringContract.load(FilePath(place.name), tokenizer)
    own = load_scorer(place, spec, say=say)
    say("note    golden scores for vLLM were computed with Hugging Face's own class")
    return own.contract.with_rules(
        golden=golden_scores(own.model, own.contract, [CANARY]), golden_dtype=spec.precision
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

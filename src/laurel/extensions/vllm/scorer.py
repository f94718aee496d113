"""A saved reward model in vLLM as a Scorer, checked against the model's golden scores.

vLLM returns the sigmoid of a score unless `use_activation` is off, and reads the hidden state where
the model's class does. An option that vLLM has renamed would be ignored without an error, so the
golden scores of the contract are recomputed before the first score is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from laurel.errors import ModelError, ScoringContractError, UserError, key_of
from laurel.extensions.vllm.pooling import PoolingOptions, VllmPooling
from laurel.extensions.vllm.sections import ScoringVllmConfig
from laurel.models.forest.decoder import Path as ModelPath
from laurel.models.loading.pretrained import find_tokenizer
from laurel.models.scoring import OLD_CONTENTS, ScoringContract, sigmoid
from laurel.models.spec import ModelSpec
from laurel.rewards.open import load_scorer, read_rules, say_rules
from laurel.rewards.remote.router import CANARY
from laurel.rewards.scorer import (
    ContractScorer,
    OnBatch,
    check_golden_by,
    golden_scores,
    golden_tolerance,
)
from laurel.rewards.spec import ModelPlace, Say, ScorerSpec
from laurel.types import TokenGroup


class VllmScorer(ContractScorer):
    """Scores groups with a model that vLLM holds in processes of its own.

    Once vLLM has died every call raises `EngineError`; make another scorer.
    """

    has_exact_scores = False

    def __init__(
        self,
        model: ModelSpec,
        contract: ScoringContract,
        *,
        options: PoolingOptions | None = None,
        batch_tokens: int = 8192,
    ) -> None:
        """Start vLLM, which takes seconds, and check its scores; `close` ends it.

        Raises:
            MissingDependencyError: vLLM is not installed.
            EngineError: vLLM does not start.
            ModelError: The tokenizer has tokens that the model does not embed.
            ScoringContractError: There are no golden scores, or vLLM gives others.
        """
        super().__init__(contract, batch_tokens=batch_tokens)
        rules = contract.rules
        if rules.steps is not None:
            raise ModelError(
                f"{model.name} is a process reward model, and vLLM reads one score of a "
                "conversation; let Laurel's own engine score it"
            )
        if not rules.golden:
            raise ScoringContractError(
                f"{model.name} has no golden scores, so nothing would show whether vLLM gives its "
                "scores; `load_vllm_scorer` computes some with Hugging Face's own class"
            )
        self._dtype = model.precision
        self._model = VllmPooling(
            model,
            options=options or PoolingOptions(),
            max_length=rules.max_length,
            batch_tokens=batch_tokens,
            reads_last=rules.pooled == "last",
        )
        try:
            num_tokens = len(self.contract.tokenizer)
            if num_tokens > self._model.vocab_size:
                raise ModelError(
                    f"the tokenizer has {num_tokens} tokens and the model embeds "
                    f"{self._model.vocab_size}: they do not belong together "
                    f"({key_of('policy.tokenizer.name')})"
                )
            self.golden_difference = self._check_golden()
            """Largest difference from a golden score, in units of max(1, |score|)."""
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> ModelPath:
        """Always `forest`: vLLM computes the prompt of a group once, as a forest does."""
        return "forest"

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        if exactly:
            raise ModelError(
                "vLLM holds a reward model in one precision and cannot score in a higher one; let "
                "Laurel's own engine measure the noise of its scores"
            )
        # Each conversation is sent whole: vLLM finds the prompt that they share by itself.
        started = [
            self._model.submit(
                [group.trunk_ids.tolist() + branch.tolist() for branch in group.branches_ids_G]
            )
            for group in tokens
        ]
        values = []
        try:
            for group, future in zip(tokens, started, strict=True):
                values_NK = future.result()
                if values_NK.shape[1] != self._num_outputs:
                    raise ScoringContractError(
                        f"vLLM gives {values_NK.shape[1]} numbers for a conversation and the model "
                        f"gave {self._num_outputs} when it was saved"
                    )
                values.append(values_NK)
                if on_batch is not None:
                    on_batch(1, group.num_tokens)
        finally:
            for future in started:
                future.cancel()
        return np.concatenate(values) if values else np.empty((0, self._num_outputs), np.float32)

    def sleep(self) -> None:
        """Free the memory of devices; on a CPU vLLM keeps its memory."""
        self._model.sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._model.wake()

    def close(self) -> None:
        """End vLLM's processes; a running call gets an `EngineError`. Idempotent."""
        self._model.close()

    @property
    def _num_outputs(self) -> int:
        return len(self.contract.rules.golden[0].values_K)

    def _check_golden(self) -> float:
        tolerance = golden_tolerance(self.contract, self._dtype)
        return check_golden_by(
            lambda tokens: self._values(tokens, None, exactly=False),
            self.contract,
            dtype=self._dtype,
            why=lambda values_K, expected_K: _cause(values_K, expected_K, tolerance),
        )


def _cause(values_K: Sequence[float], expected_K: Sequence[float], tolerance: float) -> str:
    largest = max(expected_K)
    exponentials_K = [math.exp(value - largest) for value in expected_K]
    squashed = {
        "sigmoid": [sigmoid(value) for value in expected_K],
        "softmax": [value / sum(exponentials_K) for value in exponentials_K],
    }
    for name, squashed_K in squashed.items():
        if np.allclose(values_K, squashed_K, rtol=0, atol=tolerance):
            return (
                f"this is the {name} of the score: vLLM applied an activation although it was set "
                "not to (use_activation=False). Use the version of vLLM that Laurel names"
            )
    return (
        "vLLM may have read it at another position than the last token, have calibrated it "
        "(logit_mean, logit_sigma), or compute this architecture differently. Look for files of "
        "its pooling beside the model (modules.json, config_sentence_transformers.json), or use "
        "Laurel's own engine"
    )


def load_vllm_scorer(place: ModelPlace, spec: ScorerSpec, *, say: Say) -> VllmScorer:
    """Start vLLM with a reward model, and check that it scores as it did when it was saved.

    Raises:
        UserError: The model is not a reward model, or has changed; or vLLM is not installed.
        EngineError: vLLM does not start.
    """
    rules = read_rules(place)
    if rules is not None and rules.golden:
        tokenizer = find_tokenizer(replace(spec.model, name=place.name))
        contract = ScoringContract.load(Path(place.name), tokenizer)
        if not contract.rules.has_plain_contents:
            say(f"note    {OLD_CONTENTS}")
    else:
        # A model without golden scores is loaded by Hugging Face's own class first, which computes
        # some; its memory is free again before vLLM starts.
        own = load_scorer(place, spec, say=say)
        say("note    golden scores for vLLM were computed with Hugging Face's own class")
        golden = golden_scores(own.model, own.contract, [CANARY])
        contract = own.contract.with_rules(golden=golden, golden_dtype=spec.precision)
        del own
    model = replace(spec.model, name=place.name, precision=spec.precision)
    engine = spec.engine
    section: ScoringVllmConfig = engine.section if engine is not None else ScoringVllmConfig()
    options = PoolingOptions(
        tensor_parallel_size=section.tensor_parallel_size,
        gpu_memory_utilization=section.gpu_memory_utilization,
        may_sleep=engine is not None and engine.may_sleep,
    )
    try:
        scorer = VllmScorer(model, contract, options=options, batch_tokens=spec.batch_tokens)
    except UserError as error:
        raise type(error)(f"{place.name} in vLLM: {error}") from error
    say(f"model   {place.name} in vLLM, {spec.precision}")
    say(f"checked golden scores agree (max difference {scorer.golden_difference:.1e})")
    say_rules(contract.rules, say)
    return scorer

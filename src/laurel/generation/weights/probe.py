"""The probe: a check that a generator samples from the learner's weights.

After each transfer both compute the log-probabilities of the same fixed tokens. A stale, swapped or
mistyped tensor changes them far more than another order of arithmetic does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from laurel.errors import EngineError
from laurel.types import TokenGroup

if TYPE_CHECKING:
    from laurel.models.forest.decoder import Path
    from laurel.models.forest.policy import PolicyModel
    from laurel.types import LogProbs, PaddedRows, TokenForest

Probe = Callable[[Sequence[int]], "LogProbs"]
"""A function of the learner: token ids [L] -> float32 [L - 1], the log-probabilities of tokens 1 to
L - 1 at temperature 1, under the learner's weights."""

PROBE_LENGTH = 64
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}


def default_tolerance(engine: str, learner: str) -> float:
    """Return the accepted difference of log-probabilities: that of the coarser precision."""
    return max(TOLERANCES[engine], TOLERANCES[learner])


def fitting_ids(vocab_size: int, *, max_length: int | None) -> list[int]:
    """Return the fixed test tokens of the probe, cut to the longest sequence of the model.

    They are random, so that they use more of the weights than ordinary text would.
    """
    length = min(PROBE_LENGTH, max_length or PROBE_LENGTH)
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, length)]


class ProbeAnswer(NamedTuple):
    """An engine's log-probabilities of fixed test tokens (the probe).

    They are compared with the learner's, to check that the engine has its weights.
    """

    ids_L: list[int]
    logprobs_L: LogProbs
    """float32 [L - 1]: the log-probabilities of all tokens but the first; see `Probe`."""
    tolerance: float
    """Largest accepted difference from the learner's log-probabilities."""

    def require_agreement(self, probe: Probe, *, version: int) -> float:
        """Check that engine and learner agree on the probe; return the largest difference.

        Raises:
            EngineError: They differ by more than the tolerance, in shape, or by a NaN.
        """
        engine_L = np.asarray(self.logprobs_L, np.float64)
        learner_L = np.asarray(probe(self.ids_L), np.float64)
        if engine_L.shape != learner_L.shape:
            raise EngineError(
                f"the probe of the weights of step {version} has {learner_L.shape} "
                f"log-probabilities from the learner and {engine_L.shape} from the engine"
            )
        difference_L = np.abs(engine_L - learner_L)
        # A NaN compares false with everything, so the comparison asks for agreement.
        if not np.all(difference_L <= self.tolerance):
            worst = int(np.argmax(np.where(np.isfinite(difference_L), difference_L, np.inf)))
            raise EngineError(
                f"the generator does not sample from the weights of step {version}: token "
                f"{worst + 1} of the probe has log-probability {engine_L[worst]:.6g} there and "
                f"{learner_L[worst]:.6g} in the learner, which differ by "
                f"{difference_L[worst]:.3g}, more than "
                f"policy.generation.weight_probe_tolerance={self.tolerance:g}"
            )
        return float(difference_L.max(initial=0.0))


def probe_batch(ids_L: Sequence[int], path: Path) -> TokenForest | PaddedRows:
    """Return test tokens as a model's batch: the first is the prompt, the rest the completion."""
    from laurel.data.forest import to_forest, to_padded

    tokens_L = np.asarray(ids_L, dtype=np.int32)
    group = TokenGroup(id="probe", trunk_ids=tokens_L[:1], branches_ids_G=(tokens_L[1:],))
    return to_forest([group]) if path == "forest" else to_padded([group], pad_id=0)


def model_logprobs(model: PolicyModel, ids_L: Sequence[int]) -> LogProbs:
    """Compute a model's log-probabilities of tokens, float32 [L - 1], at temperature 1.

    With its model bound, this function is a `Probe`.
    """
    batch = probe_batch(ids_L, model.path)
    temperature, model.temperature = model.temperature, 1.0
    try:
        return np.asarray(model.logprobs(batch).cpu().numpy())
    finally:
        model.temperature = temperature

"""From the scores of a reward model to rewards: reference, normalisation, scale, shift, clip."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laurel.config.environments import ScoreTransformConfig
from laurel.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers seen so far, in float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def joined(self, values: Sequence[float]) -> Moments:
        """With more numbers. Their order changes nothing, to the last bit.

        Welford's update in the form for whole batches; the batch's own moments are exact sums.
        """
        if not values:
            return self
        count = self.count + len(values)
        batch_mean = math.fsum(values) / len(values)
        batch_squares = math.fsum((value - batch_mean) ** 2 for value in values)
        away = batch_mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + away * len(values) / count,
            squares=self.squares + batch_squares + away**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float | None:
        """Standard deviation, the sum divided by the count; None where it says nothing."""
        if self.count < 2 or self.squares <= 0.0:
            return None
        return math.sqrt(self.squares / self.count)


class ScoreTransform:
    """What `ScoreTransformConfig` says is done to scores. Safe to call from several threads.

    With `normalize: running` the mean and the deviation change only when a batch ends
    (`end_batch`), and before the first has ended scores stay as they are. Were they to change with
    every score, completions of one prompt that are judged at different times would be measured by
    different rules, and learn from the difference.
    """

    def __init__(
        self, config: ScoreTransformConfig, *, stored: tuple[float | None, float | None]
    ) -> None:
        """Check that the statistics asked for are there.

        Args:
            config: The transform.
            stored: Mean and standard deviation that the model was saved with, if it was.

        Raises:
            ConfigError: They are needed and missing.
        """
        self.config = config
        self._lock = threading.Lock()
        self._seen = Moments()
        self._waiting: list[float] = []
        self._stored: tuple[float, float] | None = None
        if config.normalize == "stored":
            mean, std = stored
            if mean is None or std is None or not std > 0.0:
                raise ConfigError(
                    "env.reward_model.transform.normalize=stored: the model was saved without the "
                    "mean and standard deviation of its scores (scoring.json). Choose running or "
                    "none, or a model that `laurel rm` saved"
                )
            self._stored = mean, std

    @property
    def changes_nothing(self) -> bool:
        """Whether rewards are the scores themselves."""
        return self.config == ScoreTransformConfig()

    @property
    def factor(self) -> float:
        """How much a reward differs where the score differs by 1, short of the clip."""
        return abs(self.config.scale) / self._mean_and_std()[1]

    def rewards(
        self, scores: Sequence[float], references: Sequence[float] | None = None
    ) -> list[float]:
        """The rewards of scores.

        Args:
            scores: Of the conversations.
            references: Of the reference answers to the same prompts, where they are subtracted.
                Both are then measured from the stored mean, which cancels.
        """
        config = self.config
        if references is not None:
            scores = [s - r for s, r in zip(scores, references, strict=True)]
        if config.normalize == "running":
            with self._lock:
                self._waiting.extend(scores)
        mean, std = self._mean_and_std()
        if config.normalize == "stored" and references is not None:
            mean = 0.0
        rewards = [(score - mean) / std * config.scale + config.shift for score in scores]
        if config.clip is not None:
            low, high = config.clip
            rewards = [min(max(reward, low), high) for reward in rewards]
        return rewards

    def end_batch(self) -> None:
        """Let the scores since the last call count from now on."""
        with self._lock:
            self._seen = self._seen.joined(self._waiting)
            self._waiting = []

    @property
    def seen(self) -> Moments:
        """Of all scores of the batches that have ended."""
        with self._lock:
            return self._seen

    def _mean_and_std(self) -> tuple[float, float]:
        if self._stored is not None:
            return self._stored
        seen = self.seen
        return (0.0, 1.0) if seen.std is None else (seen.mean, seen.std)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON knows it."""
        with self._lock:
            return {"seen": asdict(self._seen), "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        with self._lock:
            self._seen = Moments(**state["seen"])
            self._waiting = list(state["waiting"])

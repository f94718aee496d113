"""What the command line says of an evaluation of a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laurel.cli.eval_scoring import EvalScorer
from laurel.evaluation.reward_bench_2 import ZeroSpread


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line says."""

    scorer: EvalScorer
    data: tuple[str, ...] = ()
    split: str | None = None
    dataset: str | None = None
    """The class that reads preferences (`pairs`)."""
    column_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the `data` section that name columns, and what they say (`pairs`)."""
    margin_key: str | None = None
    """The column that says by how much the chosen answer is better (`pairs`)."""
    prior: bool = False
    """The prior sets too (`reward-bench`)."""
    zero_spread: ZeroSpread = "limit"
    """See `evaluation.reward_bench_2`."""
    max_samples: int | None = None
    diagnostics: bool = False
    """Say what else the scores show (`pairs`); the next four and a margin key imply it."""
    train_data: tuple[str, ...] = ()
    """What the model was trained on, for baselines and leaks."""
    sensitivity: bool = False
    """Score the answers once more in other forms."""
    other_language: str | None = None
    """The same pairs in another language."""
    members: tuple[str, ...] = ()
    """Other models, whose scores of the same pairs are compared."""
    output: Path | None = None
    as_json: bool = False

    @property
    def is_diagnosed(self) -> bool:
        """Whether anything of the diagnostics is asked for."""
        return bool(
            self.diagnostics or self.margin_key or self.train_data or self.sensitivity
            or self.other_language or self.members
        )  # fmt: skip

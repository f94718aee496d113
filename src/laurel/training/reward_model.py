"""Trains reward models.

    preferences --tokens--> micro-batches --model--> scores --loss--> gradient --> step

`epochs.py` has the loop that supervised fine-tuning shares, and `run/reward_model.py` creates the
parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from laurel.config.policy import LoggerConfig
from laurel.config.reward_model import RewardTrainingConfig
from laurel.data.forest import Batcher, MicroBatch
from laurel.evaluation.benchmarks import BenchmarkSet
from laurel.evaluation.statistics import BagOfWords, unscored_pairs
from laurel.models.scoring import ScoringContract
from laurel.observe.console import (
    PairRow,
    accuracy_words,
    conversation_text,
    print_pairs,
    visible,
)
from laurel.observe.loggers import shows_whole_samples
from laurel.observe.progress import ProgressPhase
from laurel.rewards.preparing import Prepared, prepared_by
from laurel.rewards.scorer import ContractScorer, OnBatch
from laurel.training.epochs import EpochParts, EpochTraining, StepResult, Validation, validate
from laurel.training.learner import Learner, reward_values
from laurel.training.loop import RunServices, StepSummary
from laurel.training.losses import RewardLoss
from laurel.training.state import RewardRunState, write_bad_step
from laurel.training.stopping import Position
from laurel.types import Group, Preference, PreferenceSample, Score, TokenGroup

if TYPE_CHECKING:
    from laurel.models.forest.decoder import Path


MOST_ROWS_OF_BASELINE = 2_000
"""The number of training rows of the bag-of-words baseline, which must be cheap."""
SHOWN = ("loss", "accuracy", "margin_mean", "score_length_correlation", "ece")


class RewardTraining(EpochTraining[PreferenceSample, Preference]):
    """Trains a reward model on preferences."""

    state: RewardRunState
    loss: RewardLoss

    def __init__(
        self,
        section: RewardTrainingConfig,
        services: RunServices,
        parts: EpochParts[PreferenceSample],
        *,
        loss: RewardLoss,
        contract: ScoringContract,
        logging: LoggerConfig,
    ) -> None:
        super().__init__(section, services, parts, loss=loss)
        self.logging = logging
        self.contract = contract
        self.benchmarks = parts.benchmarks
        self._bag_of_words: BagOfWords | None = None
        self._baselines: dict[int, float] = {}

    @cached_property
    def scorer(self) -> LearnerScorer:
        """A scorer over the model in training, for the benchmarks if there are any."""
        return LearnerScorer(self.learner, self.contract, self.batcher)

    def label(self, sample: PreferenceSample) -> Preference:
        """Return the preference of a row."""
        return sample.preference

    def count_bad_steps(self, position: Position, taken: StepResult[PreferenceSample]) -> int:
        """Write the rows of a step that was not applied; return the number of them in a row."""
        update, samples, step = taken.update, taken.samples, position.step + 1
        if update.failure is None:
            return 0
        # Rows that teach nothing are no fault of the run, and end no row of faults either.
        if not update.metrics and self.loss.count([s.preference for s in samples]) == 0:
            self.services.progress.message(f"step {step} skipped: {update.failure}")
            return position.bad_steps
        sources = [sample.preference.source for sample in samples]
        try:
            path = write_bad_step(self.state.run_dir, step, samples, update.failure)
            kept = f"Its rows are in {path}"
        except OSError as error:
            kept = f"Its rows could not be written down: {error}"
        self.services.progress.message(f"step {step} not applied: {update.failure}. {kept}")
        shown = ", ".join(sources[:8]) + (" ..." if len(sources) > 8 else "")
        where = f"step {step}, rows {shown}"
        return self.bad_steps(update, position.bad_steps, where=where, kept=kept)

    def summarize(
        self,
        position: Position,
        taken: StepResult[PreferenceSample],
        timing: Mapping[str, float],
    ) -> StepSummary:
        """Return the metrics of every training on rows, and the counts of rows and tokens."""
        summary = super().summarize(position, taken, timing)
        lengths = [length for sample in taken.samples for length in sample.tokens.lengths_G]
        counts = {
            "train/global_valid_seqs": float(len(lengths)),
            "train/global_valid_toks": float(sum(lengths)),
            "train/bad_steps_in_a_row": float(summary.bad_steps),
            "performance/computed_tokens": float(taken.num_computed),
            "performance/groups_per_second": len(taken.samples) / timing["total_step_time"],
        }
        return replace(summary, metrics={**summary.metrics, **counts})

    def validate(
        self,
        samples: Sequence[PreferenceSample],
        micro_batches: Sequence[MicroBatch[Preference]],
        on_rows: Callable[[int], None],
    ) -> Validation:
        """Score a set, and measure how well the scores agree with the preferences."""
        validation = validate(
            self.learner,
            samples,
            micro_batches,
            loss=self.loss,
            contract=self.contract,
            on_groups=on_rows,
        )
        baseline = self._bag_of_words_baseline(samples)
        if baseline is not None and "accuracy" in validation.metrics:
            validation.metrics["bag_of_words_baseline"] = baseline
        return validation

    def _bag_of_words_baseline(self, samples: Sequence[PreferenceSample]) -> float | None:
        # Returns the accuracy of a bag of words that was trained on the first training rows. It
        # depends only on the data, so it is computed at the first validation of a set and kept.
        # None if no row has a better and a worse answer. The sets live as long as this object, so
        # no other has their ids.
        known = self._baselines.get(id(samples))
        if known is None:
            pairs = [pair for one in samples for pair in unscored_pairs(one.preference)]
            if not pairs or (bag := self._learned_bag()) is None:
                return None
            credits = [bag.credits([pair])[pair.id] for pair in pairs]
            known = self._baselines[id(samples)] = math.fsum(credits) / len(credits)
        return known

    def _bag_of_words_on(self, benchmark: BenchmarkSet) -> float | None:
        known = self._baselines.get(id(benchmark))
        if known is None and (bag := self._learned_bag()) is not None:
            scores = [
                [Score(value=bag.score(conversation_text(c.messages))) for c in group.completions_G]
                for group in benchmark.groups
            ]
            known = benchmark.figures(scores).get("accuracy")
            if known is not None:
                self._baselines[id(benchmark)] = known
        return known

    def _learned_bag(self) -> BagOfWords | None:
        if self._bag_of_words is None:
            rows = self.train[:MOST_ROWS_OF_BASELINE]
            learned = [pair for one in rows for pair in unscored_pairs(one.preference)]
            self._bag_of_words = BagOfWords.train(learned) if learned else None
        return self._bag_of_words

    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Validate on all sets, then on the benchmarks."""
        logged, keyed = super().measure(step)
        for name, benchmark in self.benchmarks.items():
            with (
                self.services.progress.phase(f"validating {name}", len(benchmark.rows)) as phase,
                self.timers.time("total_validation_time"),
            ):
                scores = self.scorer.score_now(benchmark.groups, partial(self._scored, phase))
            seconds = self.timers.collect()["total_validation_time"]
            figures = benchmark.figures(scores)
            baseline = self._bag_of_words_on(benchmark)
            if baseline is not None and "accuracy" in figures:
                figures["bag_of_words_baseline"] = baseline
            logged |= {f"validation-{name}/{key}": value for key, value in figures.items()}
            logged[f"timing/validation-{name}/total_validation_time"] = seconds
            keyed |= {f"validation-{name}_{key}": value for key, value in figures.items()}
            shown = accuracy_words(figures) or "no row has a verdict"
            if "final_score" in figures:
                shown = f"final_score {figures['final_score']:.4f}, {shown}"
            self.services.progress.message(
                f"step {step}  validation-{benchmark.name}  {shown}", is_routine=True
            )
            failures = [
                one.failure for of_row in scores for one in of_row if one.failure is not None
            ]
            if failures:
                self.services.progress.message(
                    f"step {step}  validation-{benchmark.name}  {len(failures):,} completions have "
                    f"no score; the first: {visible(failures[0])}"
                )
        return logged, keyed

    def _scored(self, phase: ProgressPhase, num_groups: int, num_tokens: int) -> None:
        self._validated(phase, num_groups)

    def report(
        self, name: str, samples: Sequence[PreferenceSample], validation: Validation, *, step: int
    ) -> None:
        """Print the results on a set; scores of the first are the checkpoint's reference scores."""
        figures = "  ".join(
            accuracy_words(validation.metrics) or f"accuracy {value:.4f}"
            if key == "accuracy"
            else f"{key} {value:.4f}"
            for key in SHOWN
            if (value := validation.metrics.get(key)) is not None
        )
        self.services.progress.message(
            f"step {step}  validation-{name}  {figures}", is_routine=True
        )
        count = self.logging.num_val_samples_to_print
        pairs = zip(samples, validation.scores_BG, strict=True)
        rows = [PairRow.of(sample.preference, scores) for sample, scores in pairs]
        table = [row for row in rows if row is not None][:count]
        if table:
            is_whole = shows_whole_samples(self.logging)
            title = f"validation-{name}, step {step}"
            print_pairs(self.services.progress.console, title, table, is_brief=not is_whole)
            self.services.logger.log_table(
                f"validation-{name}/pairs",
                PairRow.columns(),
                [row.cells for row in table],
                step=step,
            )
        if name == next(iter(self.validation)):
            self.state.remember_reference(validation.scores_BG, step=step)


# A scorer over the model in training, wherever its ranks are, by the model's own contract.


class LearnerScorer(ContractScorer):
    """A scorer over the model in training, equal to one that loads its checkpoint."""

    def __init__(self, learner: Learner, contract: ScoringContract, batcher: Batcher) -> None:
        """Take the learner of a reward model."""
        super().__init__(contract, batch_tokens=batcher.limits.forest_tokens)
        self.preparers = _Remembering(contract)
        self._learner = learner
        self._batcher = batcher

    @property
    def path(self) -> Path:
        """The layout of batches."""
        return self._batcher.path

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        if not tokens:
            return np.zeros((0, 1), dtype=np.float32)
        outputs = partial(self._learner.outputs, in_full_precision=exactly)
        return reward_values(outputs, tokens, self._batcher, on_batch)

    def sleep(self) -> None:
        """Do nothing, because the run rests the learner itself (`Learner.resting`)."""

    def wake(self) -> None:
        """Do nothing, because the run wakes the learner itself."""


class _Remembering:
    def __init__(self, contract: ScoringContract) -> None:
        self._contract = contract
        self._known: dict[Group, Prepared] = {}

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Return prepared groups; groups that were prepared before come from the cache."""
        new = [group for group in dict.fromkeys(groups) if group not in self._known]
        self._known |= zip(new, prepared_by(self._contract, new), strict=True)
        return [self._known[group] for group in groups]

    def close(self) -> None:
        """Do nothing, because there are no workers."""

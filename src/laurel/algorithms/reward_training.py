"""Training a reward model: the loop.

    preferences --tokens--> micro-batches --model--> scores --loss--> gradient --> step

What it shares with supervised fine-tuning is in `epoch_training.py`. Everything it needs is made
elsewhere (`cli/assemble.py`) and handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from laurel.algorithms.epoch_training import EpochParts, EpochTraining, Taken
from laurel.algorithms.learner import MicroBatch
from laurel.algorithms.learner_scorer import LearnerScorer
from laurel.algorithms.losses import RewardLoss
from laurel.algorithms.reward_run_state import RewardRunState, write_bad_step
from laurel.algorithms.run_state import Position
from laurel.algorithms.training_loop import Surroundings
from laurel.algorithms.validation import Validation, validate
from laurel.config.reward_training import RewardTrainingRun
from laurel.evaluation.baselines import BagOfWords, unscored_pairs
from laurel.evaluation.benchmark_sets import BenchmarkSet
from laurel.models.scoring import ScoringContract
from laurel.observe.console import PairRow, print_pairs, visible
from laurel.observe.last_words import accuracy_words
from laurel.observe.loggers import shows_whole_samples
from laurel.observe.progress import Phase
from laurel.types import Preference, PreferenceSample, Score

MOST_ROWS_OF_BASELINE = 2_000
"""Training rows that the bag of words learns from: a baseline must cost less than a validation."""
SHOWN_OF_BENCHMARKS = ("final_score", "accuracy", "longer_wins_baseline")
SHOWN = ("loss", "accuracy", "margin_mean", "score_length_correlation", "ece")


class RewardTraining(EpochTraining[PreferenceSample, Preference]):
    """One run of reward-model training."""

    state: RewardRunState
    loss: RewardLoss

    def __init__(
        self,
        config: RewardTrainingRun,
        surroundings: Surroundings,
        parts: EpochParts[PreferenceSample],
        *,
        loss: RewardLoss,
        contract: ScoringContract,
    ) -> None:
        super().__init__(config, surroundings, parts, loss=loss)
        self.contract = contract
        self.benchmarks = parts.benchmarks
        self._bag_of_words: BagOfWords | None = None
        self._baselines: dict[int, float] = {}
        self.scorer = LearnerScorer(
            parts.learner, contract, parts.batcher,
            micro_batch_size=self.section.val_micro_batch_size,
        )  # fmt: skip

    def label(self, sample: PreferenceSample) -> Preference:
        """See `EpochTraining`."""
        return sample.preference

    # ------------------------------------------------------------------------------------- a step

    def step(self, position: Position) -> Position:
        """See `TrainingLoop`."""
        taken = self.take(position)
        bad_steps = self._judge(taken, position)
        lengths = [length for sample in taken.samples for length in sample.tokens.lengths_G]
        figures = {
            "train/global_valid_seqs": float(len(lengths)),
            "train/global_valid_toks": float(sum(lengths)),
            "train/bad_steps_in_a_row": float(bad_steps),
            "performance/computed_tokens": float(taken.num_computed),
            "performance/groups_per_second": len(taken.samples) / taken.seconds,
        }
        return self.log(position, taken, bad_steps=bad_steps, figures=figures)

    def _judge(self, taken: Taken[PreferenceSample], position: Position) -> int:
        """Count a step that was not applied, keep its rows, and stop after too many."""
        update, samples, step = taken.update, taken.samples, position.step + 1
        if update.failure is None:
            return 0
        if not update.metrics and self.loss.count([s.preference for s in samples]) == 0:
            self.progress.message(f"step {step} skipped: {update.failure}")
            return position.bad_steps
        sources = [sample.preference.source for sample in samples]
        try:
            path = write_bad_step(self.state.run_dir, step, samples, update.failure)
            kept = f"Its rows are in {path}"
        except OSError as error:
            kept = f"Its rows could not be written down: {error}"
        self.progress.message(f"step {step} not applied: {update.failure}. {kept}")
        shown = ", ".join(sources[:8]) + (" ..." if len(sources) > 8 else "")
        where = f"step {step}, rows {shown}"
        return self.bad_steps(update, position.bad_steps, where=where, kept=kept)

    # --------------------------------------------------------------------------------- validating

    def validate(
        self,
        samples: Sequence[PreferenceSample],
        micro_batches: Sequence[MicroBatch[Preference]],
        on_rows: Callable[[int], None],
    ) -> Validation:
        """See `EpochTraining`."""
        validation = validate(
            self.learner, samples, micro_batches, loss=self.loss, contract=self.contract,
            on_groups=on_rows,
        )  # fmt: skip
        baseline = self._bag_of_words_baseline(samples)
        if baseline is not None and "accuracy" in validation.metrics:
            validation.metrics["bag_of_words_baseline"] = baseline
        return validation

    def _bag_of_words_baseline(self, samples: Sequence[PreferenceSample]) -> float | None:
        """The accuracy of a bag of words that learned from the first training rows.

        It depends on the data alone, so it is computed at the first validation of a set and kept.
        None where no row has a better and a worse answer.
        """
        known = self._baselines.get(id(samples))
        if known is None:
            pairs = [pair for one in samples for pair in unscored_pairs(one.preference)]
            if self._bag_of_words is None:
                rows = self.train[:MOST_ROWS_OF_BASELINE]
                learned = [pair for one in rows for pair in unscored_pairs(one.preference)]
                self._bag_of_words = BagOfWords.train(learned) if learned else None
            if self._bag_of_words is None or not pairs:
                return None
            credits = [self._bag_of_words.credits([pair])[pair.id] for pair in pairs]
            known = self._baselines[id(samples)] = math.fsum(credits) / len(credits)
        return known

    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """See `TrainingLoop`; the benchmarks come after the sets."""
        logged, keyed = super().measure(step)
        for name, benchmark in self.benchmarks.items():
            with (
                self.progress.phase(f"validating {name}", len(benchmark.rows)) as phase,
                self.timers.time("total_validation_time"),
            ):
                scores = self.scorer.score_now(benchmark.groups, partial(self._scored, phase))
            seconds = self.timers.collect()["total_validation_time"]
            figures = benchmark.figures(scores)
            logged |= {f"validation-{name}/{key}": value for key, value in figures.items()}
            logged[f"timing/validation-{name}/total_validation_time"] = seconds
            keyed |= {f"validation-{name}_{key}": value for key, value in figures.items()}
            self._report_benchmark(benchmark, scores, figures, step=step)
        return logged, keyed

    def _scored(self, phase: Phase, num_groups: int, num_tokens: int) -> None:
        self._validated(phase, num_groups)

    def _report_benchmark(
        self,
        benchmark: BenchmarkSet,
        scores: Sequence[Sequence[Score]],
        figures: Mapping[str, float],
        *,
        step: int,
    ) -> None:
        shown = "  ".join(f"{k} {figures[k]:.4f}" for k in SHOWN_OF_BENCHMARKS if k in figures)
        self.progress.message(f"step {step}  validation-{benchmark.name}  {shown}", is_routine=True)
        failures = [one.failure for of_row in scores for one in of_row if one.failure is not None]
        if failures:
            self.progress.message(
                f"step {step}  validation-{benchmark.name}  {len(failures):,} completions have no "
                f"score; the first: {visible(failures[0])}"
            )

    def report(
        self, name: str, samples: Sequence[PreferenceSample], validation: Validation, *, step: int
    ) -> None:
        """See `EpochTraining`; the scores of the first set become the checkpoint's reference."""
        figures = "  ".join(
            accuracy_words(validation.metrics) or f"accuracy {value:.4f}"
            if key == "accuracy"
            else f"{key} {value:.4f}"
            for key in SHOWN
            if (value := validation.metrics.get(key)) is not None
        )
        self.progress.message(f"step {step}  validation-{name}  {figures}", is_routine=True)
        count = self.config.logger.num_val_samples_to_print
        pairs = zip(samples, validation.scores_BG, strict=True)
        rows = [PairRow.of(sample.preference, scores) for sample, scores in pairs]
        table = [row for row in rows if row is not None][:count]
        if table:
            is_whole = shows_whole_samples(self.config.logger)
            title = f"validation-{name}, step {step}"
            print_pairs(self.progress.console, title, table, is_brief=not is_whole)
            self.logger.log_table(
                f"validation-{name}/pairs", PairRow.columns(), [row.cells for row in table],
                step=step,
            )  # fmt: skip
        if name == next(iter(self.validation)):
            self.state.remember_reference(validation.scores_BG, step=step)

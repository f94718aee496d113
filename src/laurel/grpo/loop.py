"""Runs the training loop of GRPO.

    tasks --> rollouts --> rewards --> advantages --> token forests --> log-probs --> loss --> step

`run/grpo.py` creates the parts of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from laurel.config.grpo import GRPOConfig, PolicyLossConfig
from laurel.config.policy import RolloutLoggerConfig
from laurel.data.forest import Batcher, global_batches
from laurel.grpo.advantages import (
    NO_DIVERGENCE,
    Advantages,
    completion_divergence,
    compute_advantages,
    compute_step_advantages,
    fail_without_divergence,
    greedy_rewards,
    lacks_divergences,
    leave_out_mismatched,
    mean_divergence,
    penalize_turns,
    resolve,
    sequence_errors,
    shape_rewards,
    slope,
    subtract_divergences,
)
from laurel.grpo.branching import tree_segments
from laurel.grpo.grading import alone
from laurel.grpo.metrics import (
    HealthWatch,
    control_token_metrics,
    end_batch,
    environment_metrics,
    failures_with,
    grading_metrics,
    reuse_metrics,
    rollout_metrics,
    unended_metrics,
    unended_note,
)
from laurel.grpo.shared_devices import SharedDevices
from laurel.grpo.source import Batch, GRPORunState, RolloutSource, write_bad_rollouts
from laurel.grpo.validation import PolicyValidation, validation_metrics
from laurel.models.forest.outputs import TokenOutputs
from laurel.observe.console import (
    CompletionRow,
    accuracy_words,
    completion_rows,
    print_completions,
    write_completions,
)
from laurel.observe.loggers import shows_whole_samples
from laurel.observe.progress import ProgressPhase, Timers
from laurel.protocols import Environment, Generator
from laurel.training.learner import Learner, ModelRole, Update
from laurel.training.loop import RunOutcome, RunServices, StepSummary, TrainingLoop
from laurel.training.policy_loss import PolicyLabels, PolicyLoss
from laurel.training.stopping import Position
from laurel.types import PaddedRows, RolloutGroup, TokenForest, TokenGroup

if TYPE_CHECKING:
    from laurel.types import LogProbs


NUM_LOGGED = 32
"""Validation completions that are logged with the metrics."""
FREEING_SECONDS = 60.0
"""Most seconds until shared devices are free for the learner, where a step or validation failed."""
SHOWN = ("reward_mean", "accuracy", "avg_length", "truncation_rate", "num_failures")
SHOWN_IF_ANY = ("truncation_rate", "num_failures")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """The settings of a GRPO run, resolved from its configuration."""

    grpo: GRPOConfig
    loss: PolicyLossConfig
    logging: RolloutLoggerConfig
    max_length: int
    """The maximum number of tokens of a sequence."""
    longest_completion: int
    """The maximum number of tokens of a completion."""
    batch_size: int
    """The number of completions of one optimizer step."""
    updates_per_rollout: int
    """The number of optimizer steps that train on one batch of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenStep:
    """The batch of a step, and what came of it."""

    batch: Batch
    advantages: Advantages
    updates: Sequence[Update]
    figures: Mapping[str, float]
    """Metrics of rewards and updates, by their names after `train/`."""


class GRPO(TrainingLoop[TakenStep]):
    """Runs the steps and validations of a GRPO run."""

    state: GRPORunState

    def __init__(self, settings: GRPOSettings, services: RunServices, parts: PolicyParts) -> None:
        super().__init__(services)
        self.settings = settings
        self.parts = parts
        self.estimator = resolve(settings.grpo)
        self.loss = PolicyLoss(settings.loss, max_length=settings.longest_completion)
        self._noted_unended = False
        self.health = HealthWatch(
            self.state.alarms, run_dir=self.state.run_dir, say=self.services.progress.message
        )

    def run(self, position: Position) -> RunOutcome:
        """Train from `position`, the start or that of a checkpoint, until the run ends."""
        if position.step > 0:  # a new generator knows nothing of the steps before
            self._hand_over(position.step)
            self.health.resumed(position.step)
        return super().run(position)

    def alarm(self) -> str | None:
        """Return why the run must end: the raised alarms that `stop_on` lists.

        None if no such alarm is raised.
        """
        return self.health.reason_to_stop

    def step(self, position: Position) -> TakenStep:
        """Train on the batch of a step, and send the new weights to the generator."""
        time, grpo = self.timers.time, self.settings.grpo
        num_groups = None if grpo.use_dynamic_sampling else grpo.num_prompts_per_step
        with (
            time("generation"),
            self.parts.learner_at_rest(),
            self.services.progress.phase("generating groups", num_groups, timed=True) as phase,
        ):
            batch = self.parts.source.take(
                position.step, while_waiting=partial(self._waited, phase)
            )
        with self.parts.generator_at_rest(self.timers):
            with time("policy_and_reference_logprobs"):
                old, reference, teacher = self._logprobs(batch.groups)
            with time("reward_calculation"):
                labels, advantages, figures = self._label(batch, old, reference, teacher)
            with (
                time("policy_training"),
                self.parts.scorers_at_rest(),
                self.services.progress.phase("updating", timed=True),
            ):
                updates = self._learn(batch.groups, labels)
        with (
            time("exposed_generation"),
            self.services.progress.phase("generating ahead", timed=True),
        ):
            # A signal leaves little time to wait for what is ahead.
            patience = grpo.stop_patience_seconds
            self.parts.source.settle(is_patient=lambda: self.services.stop.seconds <= patience)
        if self.services.stop.signal is None:  # else no further batch is sampled
            with time("prepare_for_generation/transfer_and_update_weights"):
                has_changed = any(update.failure is None for update in updates)
                self._hand_over(position.step + 1, has_changed=has_changed)
        figures |= _over_updates([u.metrics for u in updates if u.failure is None])
        return TakenStep(batch=batch, advantages=advantages, updates=updates, figures=figures)

    def _waited(self, phase: ProgressPhase, num_groups: int) -> None:
        phase.advance(num_groups - phase.done)
        self.check_stop()

    def _label(
        self,
        batch: Batch,
        old: list[list[LogProbs]] | None,
        reference: list[list[LogProbs]] | None,
        teacher: list[list[LogProbs]] | None,
    ) -> tuple[list[PolicyLabels], Advantages, dict[str, float]]:
        settings, kl_BG = self.settings, list[list[float]]()
        if settings.loss.use_kl_in_reward and reference is not None:
            kl_BG = [
                [
                    completion_divergence(r.logprobs_L, ref_L, r.mask_L, settings.loss)
                    for r, ref_L in zip(group.rollouts_G, reference_GL, strict=True)
                ]
                for group, reference_GL in zip(batch.groups, reference, strict=True)
            ]
            batch.groups = fail_without_divergence(batch.groups, kl_BG)
        groups = batch.groups
        shaped = shape_rewards(groups, settings.grpo, longest=settings.max_length)
        rewards_BG = shaped.rewards_BG
        figures = dict(shaped.metrics)
        if kl_BG:
            weight = settings.loss.reference_policy_kl_penalty
            rewards_BG = subtract_divergences(rewards_BG, kl_BG, weight=weight)
            figures |= mean_divergence(rewards_BG, kl_BG)
        # Noise is measured of the rewards that environments give.
        by_reward = slope(settings.grpo.reward_scaling)
        asked = {group.task.environment for group in groups}
        noises = {name: by_reward * self.parts.noise_floor_of(name) for name in asked}
        noise_B = [noises[group.task.environment] for group in groups]
        if settings.grpo.adv_estimator.per_step:
            advantages = compute_step_advantages(groups, rewards_BG, self.estimator, noise=noise_B)
        else:
            greedy_B = greedy_rewards(groups, settings.grpo, longest=settings.max_length)
            advantages = compute_advantages(
                rewards_BG,
                self.estimator,
                noise=noise_B,
                components_BG=[[r.components for r in g.rollouts_G] for g in groups],
                lengths_BG=[[int(r.mask_L.sum()) for r in g.rollouts_G] for g in groups],
                greedy_B=greedy_B,
                segments_BG=None
                if settings.grpo.tree is None
                else [tree_segments(group.rollouts_G) for group in groups],
            )
            if baselines := [reward for reward in greedy_B if reward is not None]:
                figures["reward_greedy"] = sum(baselines) / len(baselines)
        advantages = penalize_turns(advantages, groups, settings.grpo)
        used_BG = [[reward is not None for reward in row] for row in rewards_BG]
        threshold = settings.grpo.seq_logprob_error_threshold
        if threshold is not None:
            assert old is not None
            errors_BG = sequence_errors(groups, old)
            used_BG, of_errors = leave_out_mismatched(used_BG, errors_BG, threshold=threshold)
            figures |= of_errors
        tokens_BGL = advantages.tokens_BGL
        labels = [
            PolicyLabels(
                masks_GL=tuple(r.mask_L for r in group.rollouts_G),
                advantages_G=tuple(advantages.values_BG[b].tolist()),
                advantages_GL=None if tokens_BGL is None else tuple(tokens_BGL[b]),
                used_G=tuple(used_BG[b]),
                behaviour_GL=tuple(r.logprobs_L for r in group.rollouts_G),
                old_GL=None if old is None else tuple(old[b]),
                reference_GL=None if reference is None else tuple(reference[b]),
                teacher_GL=None if teacher is None else tuple(teacher[b]),
                rewards_G=tuple(r.reward for r in group.rollouts_G),
            )
            for b, group in enumerate(groups)
        ]
        return labels, advantages, figures

    def _logprobs(self, groups: Sequence[RolloutGroup]) -> tuple[list[list[LogProbs]] | None, ...]:
        # Of the policy before its updates, of the reference and of the teacher. A single update
        # needs no old log-probabilities: those that it computes itself are the old ones.
        parts, settings = self.parts, self.settings

        def logprobs_of(role: ModelRole) -> list[list[LogProbs]]:
            return policy_logprobs(
                partial(parts.learner.outputs, role=role),
                [group.tokens() for group in groups],
                parts.batcher,
            )

        is_repeated = settings.updates_per_rollout > 1
        is_needed = is_repeated and not settings.loss.force_on_policy_ratio
        is_needed |= settings.grpo.seq_logprob_error_threshold is not None
        old = logprobs_of("model") if is_needed else None
        reference = logprobs_of("reference") if parts.has_reference else None
        return old, reference, logprobs_of("teacher") if parts.has_teacher else None

    def _learn(
        self, groups: Sequence[RolloutGroup], labels: Sequence[PolicyLabels]
    ) -> list[Update]:
        # Without a signal no optimizer step is taken: Adam would move the weights even with a
        # gradient of zero.
        learner, batcher, settings = self.parts.learner, self.parts.batcher, self.settings
        tokens = [group.tokens() for group in groups]
        batches = global_batches(tokens, labels, PolicyLabels.subset, size=settings.batch_size)
        updates = []
        for _ in range(settings.grpo.num_iterations):
            for part, part_labels in batches:
                if not any(self.loss.has_signal(label) for label in part_labels):
                    continue
                micro_batches = batcher.cut(*batcher.divide(part, part_labels, PolicyLabels.subset))
                updates.append(learner.update(micro_batches, self.loss))
        return updates

    def _hand_over(self, version: int, *, has_changed: bool = True) -> None:
        # Without a change only the version is sent.
        weights = self.parts.learner.weights(version)
        if not has_changed:
            weights = replace(weights, same_as=version - 1)
        self.parts.source.wait_for(self.parts.generator.update_weights(weights))

    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Validate the policy after a step.

        Returns:
            The metrics by their names in logs, and the metrics by their names in checkpoints.
        """
        validation = self.parts.validation
        assert validation is not None
        with (
            self.services.progress.phase("validating", len(validation.chosen)) as phase,
            self.timers.time("total_validation_time"),
            self.parts.learner_at_rest(),
        ):
            groups = validation.play(self.parts.source, while_waiting=partial(self._waited, phase))
            figures = validation_metrics(groups, self.parts.environments)
        seconds = self.timers.collect()["total_validation_time"]
        self._show("validation", figures, step)
        count = self.settings.logging.num_val_samples_to_print
        rows = completion_rows(groups, step=step)
        if count:
            is_whole = shows_whole_samples(self.settings.logging)
            title = f"validation, step {step}"
            print_completions(
                self.services.progress.console, title, rows[:count], is_brief=not is_whole
            )
        table = [row.cells for row in rows[: max(count, NUM_LOGGED)]]
        self.services.logger.log_table(
            "validation/completions", CompletionRow.columns(), table, step=step
        )
        # Metrics of environments have the same names in training and validation.
        logged = {f"validation/{k}": v for k, v in figures.items()}
        self.health.validated(step, groups, logged)
        logged["timing/validation/total_validation_time"] = seconds
        keyed = {f"validation_{k}": v for k, v in figures.items()}
        for name, own in validation.by_set(groups).items():
            # Metrics of environments are logged once, over all sets, under the environments' names.
            of_set = validation_metrics(own, {})
            self._show(f"validation-{name}", of_set, step)
            logged |= {f"validation-{name}/{k}": v for k, v in of_set.items()}
            keyed |= {f"validation-{name}_{k}": v for k, v in of_set.items()}
        return logged, keyed

    def _show(self, name: str, figures: Mapping[str, float], step: int) -> None:
        shown = "  ".join(
            accuracy_words(figures) or f"accuracy {value:.4f}"
            if key == "accuracy"
            else f"{key} {value:.4f}"
            for key, value in figures.items()
            if (key in SHOWN or "/acc" in key) and (value or key not in SHOWN_IF_ANY)
        )
        self.services.progress.message(f"step {step}  {name}  {shown}", is_routine=True)

    def summarize(
        self, position: Position, taken: TakenStep, timing: Mapping[str, float]
    ) -> StepSummary:
        """Return the metrics of a step, and update the alarms."""
        batch, advantages, updates = taken.batch, taken.advantages, taken.updates
        step, groups = position.step + 1, batch.groups
        bad_steps = self._bad_steps(updates, step, batch, position.bad_steps)
        rollouts = failures_with(rollout_metrics(groups), batch.failures_left_out)
        spelled = control_token_metrics(groups, self.parts.source.chat)
        unended = unended_metrics(batch.stats)
        train = {**advantages.metrics, **rollouts, **spelled, **unended, **taken.figures}
        note = unended_note(batch.stats, max_turns=self.settings.grpo.max_rollout_turns)
        if note is not None and not self._noted_unended:
            self._noted_unended = True
            self.services.progress.message(f"step {step}: {note}")
        train.setdefault("lr", self.parts.learner.learning_rate)  # missing without an update
        train["bad_steps_in_a_row"] = float(bad_steps)
        train["optimizer_steps"] = float(sum(u.failure is None for u in updates))
        train["optimizer_steps_not_applied"] = len(updates) - train["optimizer_steps"]
        train["scorer_noise"] = self.parts.noise
        train["staleness"] = float(
            max((position.step - r.weight_version for g in groups for r in g.rollouts_G), default=0)
        )
        train["groups_replaced"] = float(batch.num_replaced)
        if self.settings.grpo.use_dynamic_sampling:
            train["dynamic_sampling_num_gen_batches"] = float(batch.num_batches)
            train["dynamic_sampling_num_discarded_valid_samples"] = float(
                batch.num_discarded * self.settings.grpo.num_generations_per_prompt
            )
            train["dynamic_sampling_num_without_signal"] = float(batch.num_without_signal)
        num_tokens = train.get("total_num_tokens", 0.0)
        logged = self.parts.transfer_metrics() | {f"train/{k}": v for k, v in train.items()}
        logged |= environment_metrics(groups, self.parts.environments)
        end_batch(groups, self.parts.environments)
        logged |= {f"timing/train/{name}": value for name, value in timing.items()}
        logged |= {
            "timing/train/rollout/generation": batch.stats.generation,
            **grading_metrics(batch.stats),
            **reuse_metrics(batch.stats),
            "performance/tokens_per_second": num_tokens / timing["total_step_time"],
            "performance/generated_tokens_per_second": batch.stats.num_tokens
            / max(batch.stats.generation, 1e-9),
        }
        divided = _over_updates([update.performance for update in updates])
        logged |= {f"performance/{name}": value for name, value in divided.items()}
        logged |= self.health.step(step, groups, logged)
        return StepSummary(
            metrics=logged,
            kept={f"train_{name}": value for name, value in train.items()},
            bad_steps=bad_steps,
            num_rows=sum(len(group.rollouts_G) for group in groups),
            num_tokens=int(num_tokens),
        )

    def after_logging(self, step: int, taken: TakenStep) -> None:
        """Write the completions to a file."""
        if not self.settings.logging.write_completions:
            return
        path = self.state.run_dir / "completions" / f"step_{step:06d}.parquet"
        advantages_BG = taken.advantages.values_BG
        rows = completion_rows(taken.batch.groups, step=step, advantages_BG=advantages_BG)
        try:
            write_completions(path, rows)
        except OSError as error:  # a full disk must not cost the step that was taken
            said = f"step {step}: its completions could not be written: {error}"
            self.services.progress.message(said)

    def _bad_steps(self, updates: Sequence[Update], step: int, batch: Batch, before: int) -> int:
        reasons = [u.failure for u in updates if u.failure is not None]
        if not updates and lacks_divergences(batch.groups):
            reasons = [NO_DIVERGENCE]
        if not reasons:
            return 0
        path = write_bad_rollouts(self.state.run_dir, step, batch.groups, reasons[0])
        kept = f"Its rollouts are in {path}"
        if len(reasons) < len(updates):
            share = f"{len(reasons)} of its {len(updates)} updates"
            self.services.progress.message(
                f"step {step}: {share} not applied: {reasons[0]}. {kept}"
            )
            return 0
        self.services.progress.message(f"step {step} not applied: {reasons[0]}. {kept}")
        update = Update(metrics={}, failure=reasons[0])
        return self.bad_steps(update, before, where=f"step {step}", kept=kept)


_COUNTS = ("global_valid_toks", "global_valid_seqs", "num_valid_samples", "num_extreme_ratios")


def _over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # Minima, maxima, sums of counts, and means of all other metrics.
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        values = [metrics[name] for metrics in updates if name in metrics]
        if name.endswith("_min"):
            figures[name] = min(values)
        elif name.endswith("_max"):
            figures[name] = max(values)
        else:
            figures[name] = sum(values) if name in _COUNTS else sum(values) / len(values)
    return figures


# What a GRPO run works with, and which part rests if several have the same devices.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyParts:
    """The components that a GRPO run works with, and which of them share devices."""

    learner: Learner
    has_reference: bool = False
    """Whether the learner has a reference policy, because the KL divergence has a weight."""
    has_teacher: bool = False
    """Whether it has a teacher, from which the policy learns besides."""
    batcher: Batcher
    generator: Generator
    source: RolloutSource
    environments: dict[str, Environment]
    noise_floor_of: Callable[[str], float]
    """Returns the noise floor of an environment: of the rewards that advantages compare."""
    validation: PolicyValidation | None
    generator_rests: bool = False
    """Whether the generator releases device memory while the learner works on the same device."""
    learner_rests: bool = False
    """Whether the learner releases device memory while the generator samples."""
    scorers_rest: bool = False
    """Whether reward models release device memory during optimizer steps."""
    devices: SharedDevices | None = None
    """The devices that the generator shares with models which sleep whenever they do not score;
    None: there are none."""

    @property
    def noise(self) -> float:
        """The largest noise floor of an environment.

        A noise floor is the standard deviation of the errors of rewards, such as those by rounding.
        """
        return max(map(self.noise_floor_of, self.environments), default=0.0)

    def transfer_metrics(self) -> dict[str, float]:
        """Return the metric that counts weight broadcasts to the generator that failed.

        In these cases Ray's object store transferred the weights. The result is empty if the
        generator does not count them.
        """
        number = getattr(self.generator, "num_weight_fallbacks", None)
        return {} if number is None else {"performance/weight_transfer_fallbacks": float(number)}

    @contextmanager
    def generator_at_rest(self, timers: Timers) -> Iterator[None]:
        """Free the generator's device memory while the context is open.

        Without `generator_rests`, do nothing.
        """
        if not self.generator_rests:
            yield
            return
        rests = self.devices or self.generator
        with timers.time("training_prep"):
            self.source.wait_for(rests.sleep())
        try:
            yield
        finally:
            with timers.time("prepare_for_generation/wake"):
                self.source.wait_for(rests.wake())

    @contextmanager
    def learner_at_rest(self) -> Iterator[None]:
        """Free the learner's device memory while the context is open, if `learner_rests`.

        It takes the memory again when models that share the devices have freed it, also where the
        run was interrupted and goes on to save.
        """
        with self.learner.resting() if self.learner_rests else nullcontext():
            if self.devices is None:
                yield
                return
            try:
                yield
            except Exception:
                # The first error counts, and what is stuck is not waited for.
                with suppress(Exception):
                    self.source.wait_for(self.devices.sleep(patience=FREEING_SECONDS))
                raise
            self.source.wait_for(self.devices.sleep())

    @contextmanager
    def scorers_at_rest(self) -> Iterator[None]:
        """Free reward models' device memory while the context is open, if `scorers_rest`."""
        with ExitStack() as stack:
            for environment in alone(self.environments.values()) if self.scorers_rest else ():
                stack.enter_context(environment.resting())
            yield


# Log-probabilities of many completions at once, under the policy or the reference.

Logprobs = Callable[[Sequence[TokenForest | PaddedRows]], Iterable[TokenOutputs]]
"""A function that computes a policy's outputs, such as `Learner.outputs`."""


def policy_logprobs(
    outputs: Logprobs, groups: Sequence[TokenGroup], batcher: Batcher
) -> list[list[LogProbs]]:
    """Compute the log-probability of every token of every completion, without gradients.

    Args:
        groups: Prompts of at least one token, with their completions.

    Returns:
        For each group, an array float32 [L] for each completion, in order: of its sequences, one
        after the other.
    """
    lengths = [group.num_own_tokens_G for group in groups]
    every = [[(g, i) for i in range(len(lengths_G))] for g, lengths_G in enumerate(lengths)]
    parts, labels = batcher.divide(groups, every, lambda of, some: [of[i] for i in some])
    micro_batches = batcher.filled().cut(parts, labels)
    computed = outputs([one.inputs for one in micro_batches])
    found: dict[tuple[int, int], LogProbs] = {}
    for micro_batch, its_outputs in zip(micro_batches, computed, strict=True):
        logprobs_M = its_outputs.logprobs_M.float().cpu().numpy()
        whose = [one for label in micro_batch.labels for one in label]
        ends = np.cumsum([lengths[g][i] for g, i in whose])
        found |= zip(whose, np.split(logprobs_M, ends[:-1]), strict=True)
    return [[found[one] for one in of_group] for of_group in every]

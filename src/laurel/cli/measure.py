"""How well a policy answers tasks that it does not learn from: no training, nothing saved."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laurel.cli.assemble_grpo import chat_of, rollouts_of, sampling_of, texts_of
from laurel.cli.found_model import with_found_model
from laurel.cli.generators import StartingPoint, make_generator
from laurel.cli.places import Places
from laurel.cli.policy_setup import load_policy_to_train
from laurel.cli.task_setup import check_answers, environments_of, fit_prompts, needs_of
from laurel.config.grpo_training import GRPORun
from laurel.data.tasks import load_task_data
from laurel.environments.registry import environment_names
from laurel.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from laurel.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurement:
    """The answers of a policy, and what they say about it."""

    groups: Sequence[RolloutGroup]
    """A group for each task, in the order of the data."""
    figures: Mapping[str, float]
    """See `algorithms.policy_validation.validation_metrics`."""

    @property
    def success_rate(self) -> float:
        """Mean reward over all samples: of a math environment, the share of right answers."""
        return self.figures["reward_mean"]


def measure_policy(config: GRPORun, *, console: Console) -> Measurement:
    """Let a policy answer the validation tasks of a configuration, and have them judged.

    Each task gets `grpo.val_num_generations_per_prompt` completions, drawn as validation draws
    them. The environments that only training tasks ask for are not started.

    Raises:
        DataError: There are no validation tasks.
    """
    config = with_found_model(config, console)
    places = Places.of_this_process()
    with ExitStack() as stack:
        data = load_task_data(
            config.data,
            default_environment=config.default_environment,
            environments=environment_names(config.env),
            needs=needs_of(config.env),
        )
        if not data.validation:
            raise DataError("there is nothing to measure on: name tasks in data.val_data_path")
        texts = texts_of(data)
        data.train.clear()
        with console.status("starting the environments"):
            environments = environments_of(data, config, stack, places, console)
        check_answers(data, environments, console)
        model = load_policy_to_train(
            config.policy, config.cluster, places, seed=config.grpo.seed, texts=texts,
            identity={}, resume_from=None, console=console,
            temperature=config.policy.generation.temperature,
        )  # fmt: skip
        from laurel.algorithms.policy_validation import PolicyValidation, validation_metrics
        from laurel.algorithms.rollout_source import RolloutSource

        chat = chat_of(config, model.facts)
        fit_prompts(data, chat, config)
        starts_from = StartingPoint(texts=tuple(texts))
        generator = make_generator(config, model, chat, places, starts_from, stack)
        stack.callback(generator.close)
        rollouts = rollouts_of(config, generator, environments, chat)
        sampling = sampling_of(config, is_validation=True)
        source = RolloutSource(
            rollouts, data.validation, config.grpo, sampling, shuffle=False, total_steps=0
        )
        stack.callback(source.close)
        validation = PolicyValidation(
            tasks=data.validation, config=config.grpo, environments=environments, sampling=sampling
        )
        with console.status(f"answering {len(data.validation):,} held-out tasks"):
            groups = validation.play(source)
        return Measurement(groups=groups, figures=validation_metrics(groups, environments))

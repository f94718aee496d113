"""Runs `laurel eval policy`: samples a model's answers to tasks and grades them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from laurel import __version__
from laurel.config.data import TaskSetConfig, is_endless
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.data.tasks import (
    TaskData,
    check_environment,
    environments_named,
    load_tasks,
    sets_of_run,
)
from laurel.environments.registry import environment_names, row_sources
from laurel.errors import ConfigError, if_interrupted, speaking
from laurel.extensions.evaluation.options import EvalPolicyOptions
from laurel.extensions.evaluation.pass_metrics import pass_metrics, reward_metrics
from laurel.models.files import local_files
from laurel.observe.console import (
    format_number,
    make_console,
    message_console,
    new_table,
    print_table,
    say_on,
    shorten_middle,
    visible,
)
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import json_text, write_json
from laurel.observe.progress import ProgressWords, TrainingProgress
from laurel.run.context import RunContext
from laurel.run.grpo import check_grpo_run, load_policy_bundle
from laurel.run.model import found_name, resolve_model
from laurel.run.request import plan_allocation
from laurel.run.specs import OPTIONS
from laurel.run.tasks import check_answers, environments_of, needs_of

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.types import RolloutGroup

# An evaluation trains nothing: it saves nothing, and samples from one version.
_ALWAYS = ("checkpointing.enabled=false", "grpo.max_staleness=0")


LONGEST = 4096
"""The largest total of prompt and answer tokens if no configuration limits it.

It leaves room for answers with a chain of thought, and fits a small GPU.
"""


def run_eval(path: Path | None, overrides: Sequence[str], options: EvalPolicyOptions) -> int:
    """Sample answers to the tasks, grade them, and print the metrics.

    Args:
        path: The configuration of a GRPO run, whose validation tasks are answered (its training
            tasks if it has no others); None is the defaults.

    Returns:
        The exit code: 1 if a completion could not be graded, otherwise 0.
    """
    for file in (options.output, options.samples):
        if file is not None:
            check_output(file, read_from="")
    console = message_console()
    if options.model:
        say = say_on(console)
        with speaking(OPTIONS):
            options = replace(options, model=found_name(options.model, say=say))
    defaults = [] if path is not None else [f"policy.max_total_sequence_length={_room(options)}"]
    changes = [*_ALWAYS, *defaults, *overrides, *_changes(options, path)]
    loaded = load_config(GRPORun, path, changes)
    for warning in loaded.warnings:
        console.print(f"warning: {warning}")
    started = time.monotonic()
    with if_interrupted(lambda: "no completion is kept"), ExitStack() as stack:
        groups, figures = _played(loaded.config, options, stack, console)
    result = _result(loaded.config, options, groups, figures, time.monotonic() - started)
    _show(result, groups, options, console)
    return 1 if figures["num_failures"] else 0


def _room(options: EvalPolicyOptions) -> int:
    """Return the model's context length in tokens, if its local files state it."""
    try:
        files = Path(local_files(options.model))
        config = json.loads((files / "config.json").read_text(encoding="utf-8"))
        return min(LONGEST, int(config["max_position_embeddings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return LONGEST


def _changes(options: EvalPolicyOptions, path: Path | None) -> list[str]:
    """Turn the options into overrides of the configuration."""
    if not options.model and path is None:
        raise ConfigError(
            "no model is named; add --model with a directory or a name on the Hugging Face hub, or "
            "--config with the configuration of a run"
        )
    changes = [f"grpo.val_num_generations_per_prompt={options.num_generations}"]
    if options.model:
        changes += [f"policy.model_name={json.dumps(options.model)}", "policy.scratch=null"]
    temperature = options.temperature
    if temperature is None and options.num_generations == 1:
        temperature = 0.0  # the one answer that counts is the likeliest
    if temperature is not None:
        changes.append(f"policy.generation.val_temperature={temperature}")
    if options.max_new_tokens is not None:
        changes.append(f"policy.generation.max_new_tokens={options.max_new_tokens}")
    return changes


_OF_ITS_ROWS = {"data_path", "split", "max_samples", "repeat", "env_name", "task_name", "kwargs"}
"""The keys of a set that say what it is, not how its rows are read."""


def _sets(config: GRPORun, options: EvalPolicyOptions) -> list[TaskSetConfig]:
    fields = (("dataset_name", options.dataset), ("data_path", options.data_path))
    changes = {key: value for key, value in fields if value is not None}
    data = config.data
    if changes:
        # Another set, which is read as that of the run is.
        own = data.train_sets()
        read_alike = TaskSetConfig.model_fields.keys() - _OF_ITS_ROWS if len(own) == 1 else set()
        base = own[0].model_dump(include=read_alike & own[0].model_fields_set)
        sets = [TaskSetConfig.model_validate(base | changes)]
    elif data.model_fields_set:
        sets = data.validation_sets() or [
            # What is made has prompts of validation, which a run never trains on.
            task_set.model_copy(update={"split": None}) if is_endless(task_set) else task_set
            for task_set in data.train_sets()
        ]
    else:
        raise ConfigError(
            "which tasks? Name them with --dataset (and --data-path for a file), or with --config"
        )
    if any(map(is_endless, sets)):
        # As the validation of a run.
        block = data.model_copy(update={"validation": dict(enumerate(sets))})
        sets = sets_of_run(block)[1]
    environment = options.environment or data.env_name
    if options.environment or changes:
        sets = [
            task_set.model_copy(update={"env_name": environment or task_set.env_name})
            for task_set in sets
        ]
    return sets


def _played(
    config: GRPORun, options: EvalPolicyOptions, stack: ExitStack, console: Console
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Generate and grade the answers; return the groups of rollouts and their metrics."""
    if not options.model:  # which is resolved, and its notes are shown
        config = resolve_model(config, console)
    check_grpo_run(config)
    environment_list = environment_names(config.env)
    default = options.environment or config.default_environment
    if options.environment:
        check_environment(default, environment_list, named_by="--environment ")
    planned = plan_allocation(config)
    sets = _sets(config, options)
    tasks, report = load_tasks(
        sets,
        name="evaluation",
        default_environment=default,
        environments=environment_list,
        needs=needs_of(config.env, *environments_named(sets, default)),
        on_bad_row=config.data.on_bad_row,
        limit=options.max_samples,
        sources=row_sources(config.env),
    )
    data = TaskData(train=[], validation=tasks, reports={"validation": report})
    everything = config.model_copy(
        update={"grpo": config.grpo.model_copy(update={"max_val_samples": len(data.validation)})}
    )
    context = RunContext(config=everything, console=console, stack=stack).with_slots(planned)
    environments = environments_of(data, context)
    check_answers(data, environments, console)
    bundle = load_policy_bundle(context, data, environments, trains=False)
    from laurel.grpo.validation import validation_metrics

    parts = bundle.parts
    assert parts.validation is not None
    console.print(report.render())
    progress = TrainingProgress(
        len(data.validation),
        0,
        console,
        words=ProgressWords("completions", "task", "answering"),
        side_by_side=-(-config.policy.generation.max_concurrent // options.num_generations),
    )
    num_done = 0

    def show(num_tasks: int) -> None:
        nonlocal num_done
        if (new := num_tasks - num_done) > 0:
            num_done = num_tasks
            progress.step(num_tasks, {}, pairs=new * options.num_generations, tokens=0)

    with progress, parts.learner_at_rest():
        groups = parts.validation.play(parts.source, while_waiting=show)
        figures = validation_metrics(groups, environments)
    rewards_BG = [[rollout.reward for rollout in group.rollouts_G] for group in groups]
    first = reward_metrics(rewards_BG)
    if "accuracy" in figures:  # rewards mean right or wrong
        first |= pass_metrics(rewards_BG)
    return groups, first | {name: v for name, v in figures.items() if name not in first}


def _result(
    config: GRPORun,
    options: EvalPolicyOptions,
    groups: Sequence[RolloutGroup],
    figures: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    generation = config.policy.generation
    temperature = generation.val_temperature
    return {
        "model": config.policy.model_name,
        "data": [
            task_set.model_dump(mode="json", exclude_none=True)
            for task_set in _sets(config, options)
        ],
        "num_generations": options.num_generations,
        "temperature": generation.temperature if temperature is None else temperature,
        "seed": config.grpo.seed,
        "laurel": __version__,
        "seconds": round(seconds, 1),
        "figures": dict(figures),
        "tasks": [
            {
                "id": group.task.id,
                "environment": group.task.environment,
                "rewards": [rollout.reward for rollout in group.rollouts_G],
                "failures": [rollout.failure for rollout in group.rollouts_G],
            }
            for group in groups
        ],
    }


def _show(
    result: Mapping[str, Any],
    groups: Sequence[RolloutGroup],
    options: EvalPolicyOptions,
    console: Console,
) -> None:
    from laurel.observe.console import completion_rows, write_completions

    if options.output is not None:
        with replace_file(options.output) as file:
            file.write(json_text(result) + "\n")
        console.print(f"written to {options.output}")
    if options.samples is not None:
        write_completions(options.samples, completion_rows(groups, step=0))
        console.print(f"samples {options.samples}")
    if options.as_json:
        write_json(result)
    else:
        print_metrics(make_console(), "Evaluation", result["figures"])


def print_metrics(console: Console, title: str, metrics: Mapping[str, float]) -> None:
    """Print metrics in two columns, name and value."""
    table = new_table(title, "metric", "value")
    for name, value in metrics.items():
        shown_name = shorten_middle(name, max(16, console.width - 16))
        table.add_row(Text(shown_name), format_number(value))
    if metrics:
        print_table(console, table)
    else:
        console.print(Text(f"{visible(title)}: no metrics"))

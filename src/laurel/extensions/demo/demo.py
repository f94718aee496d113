"""Runs `laurel demo`: the whole method on generated data, from a new model to a better policy."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section
from laurel.demo.data import (
    NUM_HELD_OUT_NUMBERS,
    demonstrations,
    held_out_tasks,
    preferences,
    prompts,
)
from laurel.errors import CheckpointError, TrainingError
from laurel.extensions.demo.comparisons import print_comparisons
from laurel.observe.comparisons import Comparison, ScoredAnswer
from laurel.observe.console import (
    accuracy_words,
    make_console,
    message_console,
    print_command,
    visible,
)
from laurel.observe.json_output import write_json
from laurel.observe.report.findings import first_findings
from laurel.observe.run_record import read_run_record
from laurel.plugins import Command, find
from laurel.run.grpo import MeasuredPolicy, measure_policy, train_policy
from laurel.run.reward_model import train_reward_model
from laurel.run.sft import fine_tune
from laurel.run.train import MAX_LINES
from laurel.types import group_of

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.training.loop import RunOutcome


NUM_DEMONSTRATIONS, NUM_PREFERENCES, NUM_PROMPTS = 16_000, 25_600, 3_840
NUM_HELD_OUT_PREFERENCES = 400
MARKER = ".laurel-demo"
SHARE_WRONG = 0.55
NUM_STAGES = 6
NUM_SHOWN = 8
MOST_BEFORE, LEAST_AFTER, LEAST_ACCURACY = 0.6, 0.9, 0.95


# Sizes that train in minutes on two cores and still reach the aims above.
_DATA_SETS = {
    "demonstrations": f"{NUM_DEMONSTRATIONS:,} conversations, more than half of them wrong",
    "preferences": f"{NUM_PREFERENCES:,} pairs of a right and a wrong completion",
    "held-out-preferences": f"{NUM_HELD_OUT_PREFERENCES} pairs about other numbers",
    "prompts": f"{NUM_PROMPTS:,} tasks for GRPO",
    "held-out-tasks": "tasks about other numbers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The results of a demo."""

    rate_before: float
    rate_after: float
    reward_accuracy: float

    def missed(self) -> list[str]:
        """Return one sentence for each target that the demo missed."""
        return [
            text
            for text, is_missed in (
                (
                    f"the warm-up reached {self.rate_before:.1%} and should reach at most "
                    f"{MOST_BEFORE:.0%}",
                    self.rate_before > MOST_BEFORE,
                ),
                (
                    f"the reward model is right on {self.reward_accuracy:.1%} of held-out pairs "
                    f"and should be on {LEAST_ACCURACY:.0%}",
                    self.reward_accuracy < LEAST_ACCURACY,
                ),
                (
                    f"GRPO reached {self.rate_after:.1%} and should reach {LEAST_AFTER:.0%}",
                    self.rate_after < LEAST_AFTER,
                ),
            )
            if is_missed
        ]


def run_demo(directory: Path, *, seed: int = 0, as_json: bool = False) -> DemoResult:
    """Generate data, fine-tune a new model, train a reward model, run GRPO against it, and report.

    Raises:
        CheckpointError: The directory holds something other than a demo.
        TrainingError: A model missed its target.
    """
    started = time.monotonic()
    console = message_console(stderr=False)
    last = console if as_json else make_console()
    if (directory / MARKER).exists():  # an earlier demo
        shutil.rmtree(directory)
    _claim(directory)
    files = Files(directory)
    _stage(console, 1, "Data")
    _write_data(files, seed)
    console.print(
        "The task: numbers in words, to be written in digits inside \\boxed{}.\n"
        f"{NUM_DEMONSTRATIONS:,} demonstrations, {SHARE_WRONG:.0%} of them with a wrong digit; "
        f"{NUM_PREFERENCES:,} preference pairs; {NUM_PROMPTS:,} prompts.\n"
        f"{NUM_HELD_OUT_NUMBERS} numbers are in no training row: everything below is measured on "
        "them.",
        markup=False,
        highlight=False,
    )
    _stage(console, 2, "Warm-up: fine-tuning a new model on the noisy demonstrations")
    fine_tuned = _finished(fine_tune(sft_run(files, seed), console=console), console)
    before = measure_policy(measuring_run(files, seed, fine_tuned), console=console)
    _say_rate(console, "after the warm-up", before)
    _stage(console, 3, "A Bradley-Terry reward model, from preferences")
    rewarding = train_reward_model(rm_run(files, seed, fine_tuned), console=console)
    reward_model = _finished(rewarding, console)
    accuracy = rewarding.metrics["validation-held-out/accuracy"]
    _say_rewards(console, rewarding)
    _stage(console, 4, "GRPO: the policy learns from the reward model alone")
    run = grpo_run(files, seed, fine_tuned, reward_model)
    learning = train_policy(run, console=console)
    trained = _finished(learning, console)
    _stage(console, 5, "The truth, before and after, on held-out tasks")
    after = measure_policy(measuring_run(files, seed, trained), console=console)
    comparisons = _compare(before, after, reward_model, console)
    # Evenly spaced: the data is in the order of the numbers.
    rows = [i * len(comparisons) // NUM_SHOWN + i % 3 for i in range(NUM_SHOWN)]
    print_comparisons(last, [comparisons[row] for row in rows])
    _stage(console, NUM_STAGES, "Report")
    result = DemoResult(
        rate_before=before.success_rate, rate_after=after.success_rate, reward_accuracy=accuracy
    )
    _report(files, result, comparisons)
    _conclude(
        last,
        files,
        policy=trained,
        reward_model=reward_model,
        rewarding=rewarding,
        learning=learning,
        rates=(before, after),
        seconds=time.monotonic() - started,
    )
    if as_json:
        write_json({**asdict(result), "report": files.report})
    if missed := result.missed():
        raise TrainingError(
            f"the demo missed its aim: {'; '.join(missed)}. Please report this with your "
            "`laurel doctor`"
        )
    return result


def write_demo_data(directory: Path, *, seed: int = 0, as_json: bool = False) -> None:
    """Write the data sets and the configurations of the demo, without training.

    The three runs follow one another, `sft`, `rm` and `grpo`: each loads the last checkpoint of the
    run before it.

    Raises:
        CheckpointError: The directory holds something other than a demo.
    """
    _claim(directory)
    files = Files(directory)
    _write_data(files, seed)
    fine_tuned = files.last_checkpoint("sft", SFT_STEPS)
    reward_model = files.last_checkpoint("rm", RM_STEPS)
    sft_run(files, seed)
    rm_run(files, seed, fine_tuned)
    grpo_run(files, seed, fine_tuned, reward_model)
    data = {name: files.data(name) for name in _DATA_SETS}
    configs = {stage: files.config(stage) for stage in ("sft", "rm", "grpo")}
    console = message_console(stderr=False)
    # One column for all paths, however long the directory's name is.
    width = max(len(str(path)) for path in (*data.values(), *configs.values()))
    for path, what in (
        *((path, _DATA_SETS[name]) for name, path in data.items()),
        *((path, f"laurel {stage} --config {path}") for stage, path in configs.items()),
    ):
        console.print(f"  {path!s:{width}}  {what}", soft_wrap=True)
    if as_json:
        write_json({"data": data, "configs": configs})


def _claim(directory: Path) -> None:
    marker = directory / MARKER
    if directory.exists() and not marker.exists() and any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} exists and no demo made it; choose another with --directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _write_data(files: Files, seed: int) -> None:
    sets: dict[str, Iterable[Mapping[str, Any]]] = {
        "demonstrations": demonstrations(NUM_DEMONSTRATIONS, seed=seed, share_wrong=SHARE_WRONG),
        "preferences": preferences(NUM_PREFERENCES, seed=seed),
        "held-out-preferences": preferences(NUM_HELD_OUT_PREFERENCES, seed=seed, held_out=True),
        "prompts": prompts(NUM_PROMPTS, seed=seed),
        "held-out-tasks": held_out_tasks(),
    }
    (files.directory / "data").mkdir(exist_ok=True)
    for name, rows in sets.items():
        with files.data(name).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _finished(outcome: RunOutcome, console: Console) -> Path:
    """Return the model of a finished run; exit if the run was stopped."""
    if outcome.ended != "finished" or outcome.latest is None:
        console.print("stopped before the end; `laurel demo` does not resume, it starts over")
        raise SystemExit(130)
    return outcome.latest


def _compare(
    before: MeasuredPolicy, after: MeasuredPolicy, reward_model: Path, console: Console
) -> list[Comparison]:
    """Pair the first answers to each held-out task before and after GRPO, with their scores."""
    from laurel.rewards.open import open_local

    scorer = open_local(str(reward_model), say=lambda text: console.print(text, soft_wrap=True))
    pairs = list(zip(before.groups, after.groups, strict=True))
    texts = [
        ["".join(m.content for m in group.rollouts_G[0].messages) for group in pair]
        for pair in pairs
    ]
    scores = scorer.score_now(
        [
            group_of(old.task.prompt, answers, group_id=old.task.id)
            for (old, _), answers in zip(pairs, texts, strict=True)
        ]
    )
    return [
        Comparison(
            prompt="\n".join(message.content for message in pair[0].task.prompt),
            expected=str(pair[0].task.metadata.get("ground_truth", "")),
            before=_answer(pair[0].rollouts_G[0].reward, answers[0], scores_G[0].value),
            after=_answer(pair[1].rollouts_G[0].reward, answers[1], scores_G[1].value),
        )
        for pair, answers, scores_G in zip(pairs, texts, scores, strict=True)
    ]


def _answer(truth: float | None, text: str, score: float | None) -> ScoredAnswer:
    return ScoredAnswer(text=text, score=score, is_right=None if truth is None else truth > 0.5)


def _report(files: Files, result: DemoResult, comparisons: list[Comparison]) -> None:
    runs = [next(iter(sorted(files.logs(stage).iterdir()))) for stage in ("sft", "rm", "grpo")]
    # By name: an extension may be left out, and imports no other.
    page: Any = find(Command, "report")
    page.write(
        files.report,
        runs,
        title="Laurel demo: numbers in words, written in digits",
        facts=[
            (
                "True success before GRPO",
                f"{result.rate_before:.1%}",
                "held-out numbers, sampled at temperature 1, checked by the math environment",
            ),
            (
                "True success after GRPO",
                f"{result.rate_after:.1%}",
                "the same tasks; the policy was rewarded by the reward model only",
            ),
            ("Reward model", f"{result.reward_accuracy:.1%}", "of held-out pairs right"),
        ],
        comparisons=comparisons[: NUM_SHOWN * 3],
    )


def _stage(console: Console, number: int, title: str) -> None:
    console.rule(f"{number} of {NUM_STAGES}. {title}", style="dim")


def _say_rate(console: Console, when: str, measured: MeasuredPolicy) -> None:
    num_samples = sum(len(group.rollouts_G) for group in measured.groups)
    console.print(
        f"true success {when}: {measured.success_rate:.1%} of {num_samples} answers to "
        f"{len(measured.groups)} held-out prompts",
        highlight=False,
    )


def _say_rewards(console: Console, rewarding: RunOutcome) -> None:
    figures = {
        name.rpartition("/")[2]: value
        for name, value in rewarding.metrics.items()
        if name.startswith("validation-held-out/")
    }
    console.print(f"reward model: {accuracy_words(figures)}, held out", highlight=False)


def _conclude(
    console: Console,
    files: Files,
    *,
    policy: Path,
    reward_model: Path,
    rewarding: RunOutcome,
    learning: RunOutcome,
    rates: tuple[MeasuredPolicy, MeasuredPolicy],
    seconds: float,
) -> None:
    """Print the end of the demo in `MAX_LINES` lines: results, findings, and the next command."""
    scored = (reward_model, files.data("held-out-preferences"))
    room = MAX_LINES - 4 - 3  # what stands before and after the findings
    console.print(f"everything took {seconds:.0f} s", highlight=False)
    _say_rewards(console, rewarding)
    for when, measured in zip(("before GRPO", "after GRPO"), rates, strict=True):
        _say_rate(console, when, measured)
    if learning.run_dir is not None:
        for finding in first_findings(read_run_record(learning.run_dir)):
            text = Text(visible(f"GRPO, {finding}"))
            room -= len(text.wrap(console, console.width))
            if room < 0:
                break
            console.print(text)
    console.print(f"policy  {policy}", soft_wrap=True)
    next_command = shlex.join(["laurel", "score", "--model", *map(str, scored)])
    print_command(console, "next    ", next_command)
    console.print(f"report  {files.report}: open it in a browser", soft_wrap=True)


S = TypeVar("S", bound=Section)

UPDATES = 4
"""The number of optimizer steps on each batch of 256 completions."""
SFT_STEPS, RM_STEPS, GRPO_STEPS = 250, 400, 75

_SHARED = (
    "policy.precision=float32",
    "policy.max_total_sequence_length=64",
    "cluster.cpu_threads=1",  # a second thread brings a model this small nothing, and can stall it
    "checkpointing.keep_top_k=1",
    "checkpointing.metric_name=null",  # the last one: choosing by held-out rows would flatter it
    "logger.tensorboard_enabled=false",
    "logger.num_val_samples_to_print=0",
)
_SFT = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=64",
    "policy.scratch.num_layers=2",
    "policy.scratch.vocab_size=350",  # words become one token each, digits stay alone
    "policy.scratch.config_overrides={initializer_range: 0.1}",
    "policy.train_micro_batch_size=64",
    "policy.train_global_batch_size=64",
    "policy.optimizer.kwargs.lr=3e-3",
    "data.split_validation_size=0",
    f"sft.max_num_steps={SFT_STEPS}",
    "sft.max_num_epochs=10",
    "sft.val_period=0",
)
_RM = (
    "data.dataset_name=BinaryPreferenceDataset",
    "policy.train_micro_batch_size=64",
    "policy.train_global_batch_size=64",
    "policy.optimizer.kwargs.lr=2e-3",
    f"rm.max_num_steps={RM_STEPS}",
    "rm.max_num_epochs=10",
    "rm.val_period=100",
)
_GRPO = (
    "policy.train_micro_batch_size=64",
    f"policy.train_global_batch_size={256 // UPDATES}",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=16",
    "grpo.num_prompts_per_step=32",
    "grpo.num_generations_per_prompt=8",
    f"grpo.max_num_steps={GRPO_STEPS}",
    "grpo.max_num_epochs=10",
    "loss_fn.reference_policy_kl_penalty=0.001",  # small: the warm-up is half wrong
    "grpo.val_period=15",
    "grpo.val_at_start=true",
    # The task is solved by the end, which is all that these two would say.
    "grpo.health.ignore=[zero_spread_groups,no_updates]",
    "env.math.num_workers=1",
    "env.reward_model.enabled=true",
    "env.reward_model.precision=float32",
)
# No run of the demo reaches this step: each saves its end alone.
_SAVED_ONCE = "checkpointing.save_period=1000000"


@dataclass(frozen=True, slots=True)
class Files:
    """The paths of a demo's files."""

    directory: Path

    def data(self, name: str) -> Path:
        """Return the path of a data set."""
        return self.directory / "data" / f"{name}.jsonl"

    def logs(self, stage: str) -> Path:
        """Return the directory of a stage's runs."""
        return self.directory / "logs" / stage

    def checkpoints(self, stage: str) -> Path:
        """Return the directory of a stage's checkpoints."""
        return self.directory / "checkpoints" / stage

    def last_checkpoint(self, stage: str, steps: int) -> Path:
        """Return the directory of the last checkpoint of a stage that trains for `steps` steps."""
        return self.checkpoints(stage) / f"step_{steps}"

    def config(self, stage: str) -> Path:
        """Return the path of a stage's full configuration."""
        return self.directory / "configs" / f"{stage}.yaml"

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return self.directory / "report.html"


def sft_run(files: Files, seed: int) -> SFTRun:
    """Configure fine-tuning of a new model on noisy demonstrations."""
    return _load(
        SFTRun,
        files,
        "sft",
        *_SFT,
        _decay(SFT_STEPS),
        f"sft.seed={seed}",
        f"data.train_data_path={_text(files.data('demonstrations'))}",
    )


def rm_run(files: Files, seed: int, policy: Path) -> RewardTrainingRun:
    """Configure training of a reward model from the fine-tuned policy."""
    return _load(
        RewardTrainingRun,
        files,
        "rm",
        *_RM,
        _decay(RM_STEPS),
        f"rm.seed={seed}",
        f"policy.model_name={_text(policy)}",
        f"data.train_data_path={_text(files.data('preferences'))}",
        f"data.validation={{held-out: {{data_path: {_text(files.data('held-out-preferences'))}}}}}",
    )


def grpo_run(files: Files, seed: int, policy: Path, reward_model: Path) -> GRPORun:
    """Configure GRPO against the reward model; validation grades held-out tasks by true answers."""
    return _load(
        GRPORun,
        files,
        "grpo",
        *_GRPO,
        _decay(GRPO_STEPS * UPDATES),
        f"grpo.seed={seed}",
        f"policy.model_name={_text(policy)}",
        f"env.reward_model.model_name={_text(reward_model)}",
        _tasks("train", files.data("prompts"), "reward_model"),
        _tasks("validation", files.data("held-out-tasks"), "math"),
    )


def measuring_run(files: Files, seed: int, policy: Path) -> GRPORun:
    """Configure the measurement on held-out tasks: two answers each at temperature 1."""
    return _load(
        GRPORun,
        files,
        "measure",
        f"policy.model_name={_text(policy)}",
        "policy.generation.max_new_tokens=16",
        f"grpo.seed={seed}",
        "grpo.max_val_samples=1000000",
        "grpo.val_num_generations_per_prompt=2",
        "env.math.num_workers=1",
        _tasks("train", files.data("held-out-tasks"), "math"),
        _tasks("validation", files.data("held-out-tasks"), "math"),
    )


def _load(schema: type[S], files: Files, stage: str, *settings: str) -> S:
    overrides = [
        *_SHARED,
        _SAVED_ONCE,
        *settings,
        f"checkpointing.checkpoint_dir={_text(files.checkpoints(stage))}",
        f"logger.log_dir={_text(files.logs(stage))}",
    ]
    config = load_config(schema, None, overrides).config
    files.config(stage).parent.mkdir(exist_ok=True)
    files.config(stage).write_text(to_yaml(config), encoding="utf-8")
    return config


def _decay(steps: int) -> str:
    return (
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: "
        f"{{start_factor: 1.0, end_factor: 0.05, total_iters: {steps}}}}}]"
    )


def _tasks(key: str, path: Path, environment: str) -> str:
    return (
        f"data.{key}={{dataset_name: ResponseDataset, data_path: {_text(path)}, "
        f"env_name: {environment}}}"
    )


def _text(path: Path) -> str:
    # JSON's escapes are valid in a value of the command line, whatever the path's characters.
    return json.dumps(str(path))

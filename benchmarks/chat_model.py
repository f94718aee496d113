"""What does a real chat model learn on a CPU? The recipes with SmolLM2-135M-Instruct, row by row.

    python benchmarks/chat_model.py --list
    python benchmarks/chat_model.py --row grpo --seeds 1 2 3
    python benchmarks/chat_model.py --row reward-ukp reward-hh --model DIRECTORY
    python benchmarks/chat_model.py grpo.max_num_steps=6 --row tools   # KEY=VALUE come first
    python benchmarks/chat_model.py --markdown             # what is there, as tables

Each row runs a recipe of recipes/ in processes of its own, and writes its figures below `--work`. A
row that is there is not run again, and one that was stopped goes on from its last checkpoint. The
figures are those after the last step: no checkpoint is picked. Held-out rows of preferences are a
sample of the validation set (`--validation`), the same for all rows, because a CPU scores as slowly
as it trains. Seconds mean nothing on a busy machine: its load is beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_DIR
from rounds import machine, table, write_json

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
LAUREL = (sys.executable, "-m", "laurel.cli.main")
SET = "validation-default"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Preferences to learn from, and how much of them is learned from."""

    files: str
    """What the names of the files have before `train` and `validation`."""
    tokens: int
    """The longest conversation; longer ones lose their beginning."""
    steps: int


PAIRS = {
    "ukp": Pairs("ukp_convarg1/", tokens=256, steps=160),
    "hh": Pairs("hh_rlhf_harmless/", tokens=160, steps=100),
    "ultrafeedback": Pairs("ultrafeedback_1k/", tokens=384, steps=16),
    "gsm8k": Pairs("gsm8k_model_solutions/pairs_", tokens=384, steps=20),
}
TOOL_FIGURES = {
    "right": "accuracy",
    "calling": "env/tools/tools/calling_share",
    "malformed": "env/tools/tools/calls/malformed",
    "wrong arguments": "env/tools/tools/calls/wrong_arguments",
    "cut off": "truncation_rate",
}
"""What is said of held-out problems with a calculator; `malformed` are shares of calls."""
RATES = (2e-6, 1e-5, 5e-5, 2e-4)
"""Learning rates of the row `rates`: that of Laurel's defaults first."""
SIZES = {
    "8_pairs": ("policy.train_global_batch_size=8", "rm.max_num_steps=40"),
    "16_pairs": ("rm.max_num_steps=20",),
    "32_pairs": ("policy.train_global_batch_size=32", "rm.max_num_steps=10"),
    "128_tokens": ("policy.max_total_sequence_length=128", "rm.max_num_steps=20"),
}
"""Steps and rows of the row `sizes`, all of 320 pairs; where nothing is said, 16 of 256 tokens."""
POLICY_RATES = (5e-6, 1e-5, 3e-5, 1e-4)
POLICY_SWEEP = {
    **{f"rate_{rate:g}": (f"policy.optimizer.kwargs.lr={rate}",) for rate in POLICY_RATES},
    "2_x_16": ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=16"),
    "8_x_4": ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"),
}
"""What the row `grpo-sweep` changes in the recipe, which has a rate of 1e-5, and 4 prompts x 8
completions a step; 5e-6 is Laurel's default."""


def main() -> None:
    options = read_options()
    options.work = options.work.resolve()
    if options.list:
        print("\n".join(rows()))
        return
    for name in options.row:
        rows()[name](options)
    print(report(options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--row", nargs="+", default=[], choices=list(rows()), metavar="NAME")
    add("--list", action="store_true", help="print the names of the rows")
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a directory or a hub name")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the rows grpo, reward-gsm8k")
    add("--vllm-python", default=sys.executable, help="interpreter with vLLM, of the row vllm")
    add("--validation", type=int, default=400, help="held-out pairs")
    add("--threads", type=int, default=1)
    add("--work", type=Path, default=Path("benchmark_results/chat_model"))
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes of the recipes")
    return parser.parse_args()


def rows() -> dict[str, Callable[[argparse.Namespace], None]]:
    """The rows by name, in the order of their worth."""
    preferences = {f"reward-{name}": lambda o, name=name: reward_row(o, name) for name in PAIRS}
    return {
        "grpo": grpo_row,
        **preferences,
        "reward-gsm8k": seeds_row,
        "reward-gsm8k-lora": adapters_row,
        "rates": rates_row,
        "sizes": sizes_row,
        "grpo-sweep": grpo_sweep_row,
        "tools": tools_row,
        "code": code_row,
        "judge": judge_row,
        "resume": resume_row,
        "placement": placement_row,
        "vllm": vllm_row,
        "pushed": pushed_row,
        "best-of": best_of_row,
    }


def grpo_row(options: argparse.Namespace) -> None:
    """The form of an answer from 32 examples, then GRPO on known answers, once a seed."""
    settings = problem_settings(options)
    for seed in options.seeds:
        run = options.work / f"grpo_{seed}"
        if figures_of(run):
            continue
        seconds = train(
            options,
            "grpo",
            "smollm2_grpo_cpu.yaml",
            run,
            *settings,
            f"grpo.seed={seed}",
        )
        steps = metrics(run)
        validated = [line for line in steps if "validation/accuracy" in line]
        curve = {line["step"]: line["validation/accuracy"] for line in validated}
        write_figures(
            run,
            seed=seed,
            steps=steps[-1]["step"],
            prompts=int(validated[0]["validation/num_valid_samples"]),
            curve=curve,
            rewards={
                line["step"]: line["train/reward"] for line in steps if "train/reward" in line
            },
            seconds=seconds,
        )


def problem_settings(options: argparse.Namespace) -> list[str]:
    """Settings of GRPO on the largest of five numbers, after the warm-up."""
    problems = written_by("largest_number", options)
    return [
        f"policy.model_name={newest(warm_up(options))}",
        f"data.system_prompt_file={problems}/system.txt",
        f"data.train.data_path={problems}/tasks.jsonl",
        f"data.validation.data_path={problems}/tasks_test.jsonl",
    ]


def unvalidated(options: argparse.Namespace) -> list[str]:
    """The same without validation."""
    return [
        *problem_settings(options),
        "~data.validation",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]


def warm_up(options: argparse.Namespace) -> Path:
    """The run that has learned the form of answers about the largest number."""
    run: Path = options.work / "warm_up"
    if not list(run.glob("step_*")):
        train(
            options,
            "sft",
            "smollm2_sft_cpu.yaml",
            run,
            f"policy.model_name={options.model}",
            f"data.train.data_path={written_by('largest_number', options)}/demonstrations.jsonl",
        )
    return run


def tools_row(options: argparse.Namespace) -> None:
    """The form of a call from 16 of them, then GRPO on answers: does it find out that calls pay?"""
    run = options.work / "tools"
    if figures_of(run):
        return
    problems = written_by("calculator_sums", options)
    warm = options.work / "tools_warm_up"
    if not list(warm.glob("step_*")):
        train(
            options,
            "sft",
            "smollm2_tools_sft_cpu.yaml",
            warm,
            f"policy.model_name={options.model}",
            f"data.train.data_path={problems}/demonstrations.jsonl",
        )
    recipe = RECIPES / "smollm2_tools_cpu.yaml"
    held_out = f"data.validation.data_path={problems}/tasks_test.jsonl"
    untrained = evaluate(
        options,
        "tools_untrained",
        *("policy", "-m", str(options.model), "-c", str(recipe), "--temperature", "1"),
        held_out,
        "policy.tokenizer.chat_template=hermes",
    )["figures"]
    seconds = train(
        options,
        "grpo",
        recipe.name,
        run,
        f"policy.model_name={newest(warm)}",
        f"data.train.data_path={problems}/tasks.jsonl",
        held_out,
    )
    lines = metrics(run)
    curve = {"untrained, held out": shares_of(untrained, "")}
    for line in lines:
        if "validation/accuracy" in line:
            curve[f"{line['step']}, held out"] = shares_of(line, "validation/")
        if "train/loss" in line or "train/reward" in line:
            drawn = {**line, "accuracy": line["train/reward"]}
            drawn["truncation_rate"] = line.get("train/truncation_rate", 0.0)
            curve[f"{line['step']}, in training"] = shares_of(drawn, "")
    write_figures(run, curve=curve, seconds=seconds)


def shares_of(line: dict[str, Any], prefix: str) -> dict[str, float]:
    """The figures of `TOOL_FIGURES`; of no calls no share is malformed."""
    return {name: line.get(prefix + key, 0.0) for name, key in TOOL_FIGURES.items()}


def code_row(options: argparse.Namespace) -> None:
    """Functions of MBPP, four samples each: pass@1, verdicts, and what is left in the machine."""
    run = options.work / "code"
    if figures_of(run):
        return
    found = evaluate(
        options,
        "code",
        *("policy", "-m", str(options.model), "-e", "code", "--dataset", "MBPP"),
        *("--data-path", str(DATA_DIR.resolve() / "mbpp" / "test.jsonl.gz")),
        *("-n", "4", "--temperature", "1", "--max-samples", "60", "--max-new-tokens", "256"),
        "policy.precision=float32",
        f"cluster.cpu_threads={options.threads}",
    )
    write_figures(run, **found["figures"])


def judge_row(options: argparse.Namespace) -> None:
    """Which of two solutions is right, by the untrained model: written, and by log-probability."""
    pairs = sample(options, "gsm8k_model_solutions/pairs_validation")
    for read_out in ("log_probability", "written"):
        run = options.work / f"judge_{read_out}"
        if figures_of(run):
            continue
        run.mkdir(parents=True, exist_ok=True)
        judge = {
            "read_out": read_out,
            "compares": True,
            **({"max_tokens": 320} if read_out == "written" else {}),
        }
        file = run / "judge.yaml"
        model = {"model_name": str(options.model), "precision": "float32"}
        file.write_text(json.dumps({**model, "judge": judge}), encoding="utf-8")
        found = evaluate(
            options, run.name, "pairs", "--judge", str(file), "-d", str(pairs), "--device", "cpu"
        )
        write_figures(run, found=found)


def resume_row(options: argparse.Namespace) -> None:
    """Runs of four steps that are killed three times, beside undisturbed ones, bit for bit."""
    runs = {
        "grpo": (
            "smollm2_grpo_cpu.yaml",
            *unvalidated(options),
            "grpo.max_num_steps=4",
        ),
        "rm": (
            "smollm2_reward_cpu.yaml",
            f"policy.model_name={options.model}",
            f"data.train_data_path={data('ukp_convarg1/train')}",
            "~data.val_data_path",
            "policy.train_global_batch_size=2",
            "rm.max_num_steps=4",
        ),
    }
    for command, (recipe, *settings) in runs.items():
        run = options.work / f"resume_{command}"
        if figures_of(run):
            continue
        settings = [*settings, "checkpointing.save_period=2"]
        train(options, command, recipe, run / "undisturbed", *settings)
        killed = run / "killed"
        moments = {
            "in the second step": lambda where=killed: has_step(where, 1),
            "while the first checkpoint is written": lambda where=killed: any(
                where.glob(".tmp-*/*.safetensors")
            ),
            "in the fourth step": lambda where=killed: has_step(where, 3),
        }
        seconds = {}
        for moment, is_now in moments.items():
            started = time.monotonic()
            train(options, command, recipe, killed, *settings, watch=killer(is_now))
            seconds[moment] = time.monotonic() - started
        train(options, command, recipe, killed, *settings)
        hashes = [weights_in(run / name / "step_4") for name in ("undisturbed", "killed")]
        same = {name: digest == hashes[1].get(name) for name, digest in hashes[0].items()}
        losses = [
            [line["train/loss"] for line in metrics(run / name) if "train/loss" in line]
            for name in ("undisturbed", "killed")
        ]
        write_figures(
            run, seconds=seconds, same_files=same, same_losses=losses[0] == losses[1], losses=losses
        )


def killer(is_now: Callable[[], bool]) -> Callable[[subprocess.Popen[bytes]], None]:
    """Kill a run as soon as something is so."""
    return lambda process: process.kill() if is_now() else None


def weights_in(checkpoint: Path) -> dict[str, str]:
    """The hashes of the files of weights and optimizer in a checkpoint."""
    files = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    return {name: file["sha256"] for name, file in files.items() if name.endswith(".safetensors")}


def has_step(run: Path, step: int) -> bool:
    """Whether a run that may be going on has finished a step."""
    try:
        return any(line["step"] >= step for line in metrics(run))
    except json.JSONDecodeError:  # a line that is being written
        return False


LONG = 2000
"""Characters that are more than 256 tokens."""
PLACES = {
    "one process": (),
    "FSDP2 over 2 slots": ("cluster.gpus_per_node=2",),
    "tensor parallel over 3 slots": (
        "cluster.gpus_per_node=3",
        "policy.dtensor_cfg.tensor_parallel_size=3",
    ),
}
"""Where a reward model is trained. It has 9 heads, which 2 does not divide."""
ROLES = {
    "one process": (),
    "the reward model on its own slot": (
        "cluster.gpus_per_node=2",
        "env.reward_model.resources.gpus_per_node=1",
    ),
}
"""Where a policy and its reward model are."""


def placement_row(options: argparse.Namespace) -> None:
    """Steps of a reward model, and of GRPO with it, in one process and over slots of Ray."""
    judge = options.work / "resume_rm" / "undisturbed"
    if not list(judge.glob("step_*")):
        resume_row(options)
    for command, places in (("rm", PLACES), ("grpo", ROLES)):
        for place, settings in places.items():
            run = options.work / f"placement_{command}_{place.replace(' ', '_')}"
            if figures_of(run):
                continue
            recipe, *changes = short_run(options, command, judge)
            watched = Memory()
            with all_returned():
                seconds = train(options, command, recipe, run, *changes, *settings, watch=watched)
            steps = [line for line in metrics(run) if "train/loss" in line]
            write_figures(
                run,
                place=place,
                losses=[line["train/loss"] for line in steps],
                rewards=[line["train/reward"] for line in steps if "train/reward" in line],
                step_seconds=[line["timing/train/total_step_time"] for line in steps],
                gib={name: size / 2**30 for name, size in watched.most.items()},
                seconds=seconds,
            )


def short_run(options: argparse.Namespace, command: str, judge: Path) -> tuple[str, ...]:
    """The recipe and the settings of three steps without validation."""
    if command == "rm":
        return (
            "smollm2_reward_cpu.yaml",
            f"policy.model_name={options.model}",
            f"data.train_data_path={long_pairs(options)}",
            "~data.val_data_path",
            "policy.train_global_batch_size=2",
            "policy.precision=float32",  # of bfloat16 the losses of places differ by its rounding
            "rm.max_num_steps=3",
            "checkpointing.enabled=false",
            "cluster.device=cpu",
        )
    return (
        "smollm2_grpo_cpu.yaml",
        *unvalidated(options),
        "data.env_name=reward_model",
        "+env.reward_model.enabled=true",
        f"+env.reward_model.model_name={newest(judge)}",
        "+env.reward_model.precision=float32",
        "grpo.max_num_steps=3",
        "checkpointing.enabled=false",
        "cluster.device=cpu",
    )


@contextlib.contextmanager
def all_returned() -> Iterator[None]:
    """Let malloc give back what is freed: a plan counts what is in use. Steps take longer then."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


class Memory:
    """Looks what a run and the processes below it hold, without the files that they map."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def __call__(self, process: subprocess.Popen[bytes]) -> None:
        """Look once."""
        psutil: Any = importlib.import_module("psutil")
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            for one in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    name = "driver" if one is top else one.name()
                    if one is top or name.startswith("ray::"):
                        name = f"{name} {one.pid}"
                        held = one.memory_info()
                        size = held.rss - held.shared
                        self.most[name] = max(size, self.most.get(name, 0))
        time.sleep(0.1)


def vllm_row(options: argparse.Namespace) -> None:
    """Steps of GRPO whose completions vLLM samples: how far are its log-probabilities?"""
    run = options.work / "vllm"
    if figures_of(run):
        return
    train(
        options,
        "grpo",
        "smollm2_grpo_cpu.yaml",
        run,
        *unvalidated(options),
        "grpo.max_num_steps=4",
        "checkpointing.enabled=false",
        "policy.generation.backend=vllm",
        python=options.vllm_python,
    )
    steps = [line for line in metrics(run) if "train/loss" in line]
    keys = ("token_mult_prob_error", "token_mult_prob_error_max", "gen_kl_error", "reward")
    write_figures(run, **{key: [line[f"train/{key}"] for line in steps] for key in keys})


def judge_of_numbers(options: argparse.Namespace) -> Path:
    """The run of a reward model that prefers the largest number to another of the list."""
    problems = written_by("largest_number", options)
    judge: Path = options.work / "pushed_judge"
    if not list(judge.glob("step_*")):
        train(
            options,
            "rm",
            "smollm2_reward_cpu.yaml",
            judge,
            f"policy.model_name={options.model}",
            f"data.train_data_path={number_pairs(problems, 'tasks', 320)}",
            f"data.val_data_path={number_pairs(problems, 'tasks_test', 64)}",
            "policy.max_total_sequence_length=96",
            "policy.precision=float32",
            "rm.max_num_steps=20",
        )
    return judge


def pushed_row(options: argparse.Namespace) -> None:
    """GRPO against a reward model, known answers beside it, at the rate and at ten times it."""
    judge = judge_of_numbers(options)
    for name, rate in (("rate", 1e-5), ("ten times the rate", 1e-4)):
        run = options.work / f"pushed_{rate:g}"
        if figures_of(run):
            continue
        train(
            options,
            "grpo",
            "smollm2_grpo_cpu.yaml",
            run,
            *unvalidated(options),
            "data.env_name=judged",
            "+env.reward_model.enabled=true",
            f"+env.reward_model.model_name={newest(judge)}",
            "+env.reward_model.precision=float32",
            "+env.composite.judged.parts=[{env: reward_model}, {env: math, weight: 0}]",
            f"policy.optimizer.kwargs.lr={rate}",
            "checkpointing.save_period=100",
        )
        steps = [line for line in metrics(run) if "train/loss" in line]
        write_figures(run, name=name, steps=steps)


def best_of_row(options: argparse.Namespace) -> None:
    """The best of 16 answers by that reward model, without any training of the policy."""
    run = options.work / "best_of"
    if figures_of(run):
        return
    problems = written_by("largest_number", options)
    run.mkdir(parents=True, exist_ok=True)
    samples, groups = run / "samples.parquet", run / "groups.jsonl"
    drawn = evaluate(
        options,
        "best_of_samples",
        *("policy", "-c", str(RECIPES / "smollm2_grpo_cpu.yaml")),
        *("-m", str(newest(warm_up(options))), "-n", "16", "--temperature", "1"),
        *("--max-samples", "200", "--samples", str(samples)),
        f"data.system_prompt_file={problems}/system.txt",
        f"data.validation.data_path={problems}/tasks_test.jsonl",
    )["figures"]
    write_groups(problems, samples, groups)
    found = evaluate(
        options,
        "best_of_scores",
        *("best-of-n", "-m", str(newest(judge_of_numbers(options))), "-d", str(groups)),
        *("--device", "cpu"),
    )
    write_figures(run, policy=drawn, found=found)


def write_groups(problems: Path, samples: Path, groups: Path) -> None:
    """Write what was sampled as lists of completions, each with which of them are correct."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    tasks = (problems / "tasks_test.jsonl").read_text(encoding="utf-8").splitlines()
    lists: dict[str, dict[str, Any]] = {}
    for row in parquet.read_table(samples).to_pylist():
        question = json.loads(tasks[int(row["task"].rpartition(":")[2]) - 1])["question"]
        empty = {"prompt": prompt_of(problems, question), "completions": [], "correct": []}
        one = lists.setdefault(row["task"], empty)
        one["completions"].append(row["completion"])
        one["correct"].append(row["reward"] == 1.0)
    lines = (json.dumps(one) + "\n" for one in lists.values())
    groups.write_text("".join(lines), encoding="utf-8")


def prompt_of(problems: Path, question: str) -> list[dict[str, str]]:
    """The messages before an answer about the largest number."""
    system = (problems / "system.txt").read_text(encoding="utf-8")
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def number_pairs(problems: Path, name: str, count: int) -> Path:
    """Write pairs: the largest number in a box, and another number of the list in one."""
    written = problems / f"pairs_{name}.jsonl"
    chance = random.Random(1)
    lines = []
    for text in (problems / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(text)
        others = [number for number in row["question"].split(", ") if number != row["answer"]]
        lines.append(
            {
                "prompt": prompt_of(problems, row["question"]),
                "chosen": f"\\boxed{{{row['answer']}}}",
                "rejected": f"\\boxed{{{chance.choice(others)}}}",
            }
        )
    written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return written


def reward_row(options: argparse.Namespace, name: str, *changes: str, run_name: str = "") -> None:
    """A reward model, its baselines on the same rows, and what it has learned beyond them."""
    pairs = PAIRS[name]
    run = options.work / (run_name or f"reward_{name}")
    if figures_of(run):
        return
    seconds = train(
        options,
        "rm",
        "smollm2_reward_cpu.yaml",
        run,
        f"policy.model_name={options.model}",
        f"policy.max_total_sequence_length={pairs.tokens}",
        f"rm.max_num_steps={pairs.steps}",
        f"data.train_data_path={data(pairs.files + 'train')}",
        f"data.val_data_path={sample(options, pairs.files + 'validation')}",
        *changes,
    )
    lines = metrics(run)
    steps = [line for line in lines if "train/accuracy" in line]
    final = next(line for line in reversed(lines) if f"{SET}/accuracy" in line)
    tail = steps[-max(1, len(steps) // 10) :]
    write_figures(
        run,
        steps=steps[-1]["step"],
        pairs=int(final[f"{SET}/num_valid_samples"]),
        train_accuracy=sum(line["train/accuracy"] for line in tail) / len(tail),
        losses=[line["train/loss"] for line in steps],
        seconds=seconds,
        **{
            key: final[f"{SET}/{key}"]
            for key in (
                "accuracy",
                "loss",
                "bag_of_words_baseline",
                "longer_wins_baseline",
                "score_length_correlation",
            )
            if f"{SET}/{key}" in final
        },
    )


def seeds_row(options: argparse.Namespace) -> None:
    """Right against wrong solutions, once a seed, which orders the pairs and draws the head."""
    for seed in options.seeds:
        reward_row(options, "gsm8k", f"rm.seed={seed}", run_name=f"reward_gsm8k_{seed}")


def adapters_row(options: argparse.Namespace) -> None:
    """The same pairs with adapters of low rank instead of every weight."""
    reward_row(
        options,
        "gsm8k",
        "rm.seed=1",
        "policy.dtensor_cfg.lora_cfg.enabled=true",
        "policy.dtensor_cfg.lora_cfg.dim=32",
        "policy.optimizer.kwargs.lr=1e-3",
        run_name="reward_gsm8k_lora",
    )


def rates_row(options: argparse.Namespace) -> None:
    """Rates beside the default, everything else as a newcomer leaves it, on a small set."""
    for rate in RATES:
        reward_row(
            options,
            "ukp",
            "~policy.scheduler",
            "policy.precision=float32",
            "rm.max_num_steps=20",
            f"policy.optimizer.kwargs.lr={rate}",
            run_name=f"rate_{rate:g}",
        )


def sizes_row(options: argparse.Namespace) -> None:
    """The same number of pairs in steps of other sizes, and cut shorter."""
    for name, changes in SIZES.items():
        reward_row(
            options,
            "ukp",
            "~policy.scheduler",
            "policy.precision=float32",
            "policy.optimizer.kwargs.lr=1e-4",
            *changes,
            run_name=f"size_{name}",
        )


def grpo_sweep_row(options: argparse.Namespace) -> None:
    """Eight steps of GRPO on known answers, and how many held-out lists are right then."""
    for name, changes in POLICY_SWEEP.items():
        run = options.work / f"policy_{name}"
        if figures_of(run):
            continue
        seconds = train(
            options,
            "grpo",
            "smollm2_grpo_cpu.yaml",
            run,
            *problem_settings(options),
            "grpo.max_num_steps=8",
            "grpo.val_at_start=false",
            "grpo.seed=1",
            *changes,
        )
        steps = [line for line in metrics(run) if "train/reward" in line]
        write_figures(
            run,
            right=metrics(run)[-1]["validation/accuracy"],
            prompts=int(metrics(run)[-1]["validation/num_valid_samples"]),
            rewards=[line["train/reward"] for line in steps],
            # A step whose groups all have one reward updates nothing.
            grad_norms=[line.get("train/grad_norm", 0.0) for line in steps],
            entropy=[line["train/entropy"] for line in steps if "train/entropy" in line],
            seconds=seconds,
        )


def data(name: str) -> Path:
    path = DATA_DIR.resolve() / f"{name}.jsonl.gz"
    if not path.is_file():
        raise SystemExit(f"no data: {path} not found (set LAUREL_DATA)")
    return path


def sample(options: argparse.Namespace, name: str) -> Path:
    """Write the held-out rows: so many of the set, chosen by a fixed seed."""
    written: Path = options.work / f"{name.replace('/', '_')}_{options.validation}.jsonl"
    if not written.is_file():
        with gzip.open(data(name), "rt", encoding="utf-8") as file:
            lines = list(file)
        random.Random(0).shuffle(lines)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("".join(lines[: options.validation]), encoding="utf-8")
    return written


def long_pairs(options: argparse.Namespace) -> Path:
    """Write pairs of answers that are cut to the longest row: a pass has what a plan counts."""
    written: Path = options.work / "long_pairs.jsonl"
    if not written.is_file():
        with gzip.open(data("ultrafeedback_1k/train"), "rt", encoding="utf-8") as file:
            lines = [line for line in file if shorter_answer(json.loads(line)) > LONG]
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("".join(lines), encoding="utf-8")
    return written


def shorter_answer(row: dict[str, str]) -> int:
    return min(len(row["chosen"]), len(row["rejected"]))


def train(
    options: argparse.Namespace,
    command: str,
    recipe: str,
    run: Path,
    *settings: str,
    watch: Callable[[subprocess.Popen[bytes]], None] | None = None,
    python: str = sys.executable,
) -> float:
    """Run a recipe, or go on with it; return the seconds of this process.

    `watch` is called again and again while it runs, and may kill it.
    """
    words = [
        python,
        *LAUREL[1:],
        command,
        "--config",
        str(RECIPES / recipe),
        *settings,
        f"checkpointing.checkpoint_dir={run}",
        f"logger.log_dir={run}/logs",
        f"cluster.cpu_threads={options.threads}",
        *options.overrides,
    ]
    run.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (run / "output.txt").open("a", encoding="utf-8") as log:
        done = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        while watch is not None and done.poll() is None:
            watch(done)
            time.sleep(0.02)
        is_killed = done.wait() == -signal.SIGKILL and watch is not None
    if done.returncode and not is_killed:
        end = (run / "output.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"laurel {command} ended with {done.returncode}; its end:\n{end}")
    return time.monotonic() - started


def evaluate(options: argparse.Namespace, name: str, *words: str) -> dict[str, Any]:
    """What `laurel eval` prints as JSON, which is kept; its messages are in a file."""
    run: Path = options.work / name
    kept = run / "evaluation.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    run.mkdir(parents=True, exist_ok=True)
    command = [*LAUREL, "eval", *words, "--json"]
    with (run / "output.txt").open("a", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if done.returncode > 1:  # 1: a completion could not be graded, which the figures say
        raise SystemExit(f"laurel eval ended with {done.returncode}: see {run / 'output.txt'}")
    found: dict[str, Any] = json.loads(done.stdout)
    kept.write_text(done.stdout, encoding="utf-8")
    return found


def written_by(example: str, options: argparse.Namespace) -> Path:
    """The directory that a program of examples/ fills with problems."""
    problems: Path = options.work / example
    if not problems.is_dir():
        writer = ROOT / "examples" / f"{example}.py"
        subprocess.run([sys.executable, str(writer), str(problems)], check=True)
    return problems


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max(run.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def metrics(run: Path) -> list[dict[str, Any]]:
    """All steps of a run, over the processes that it took; the last value of a step counts."""
    steps: dict[tuple[int, bool], dict[str, Any]] = {}
    for file in sorted(run.glob("logs/*/metrics.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            validated = any(key.startswith("validation") for key in line)
            steps.setdefault((line["step"], validated), {}).update(line)
    return [steps[key] for key in sorted(steps)]


def write_figures(run: Path, **figures: Any) -> None:
    record = {**figures, "load": os.getloadavg()[0], "machine": machine()}
    write_json(run / "figures.json", record)


def figures_of(run: Path) -> dict[str, Any] | None:
    path = run / "figures.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def report(options: argparse.Namespace) -> str:
    """What the rows that are there have given."""
    parts = []
    runs = [figures_of(path) for path in sorted(options.work.glob("grpo_*"))]
    policies = [run for run in runs if run]
    if policies:
        header = ["seed", "steps", "before", "after", "gain", "curve"]
        lines = [
            [
                str(run["seed"]),
                str(run["steps"]),
                share(values[0], run["prompts"]),
                share(values[-1], run["prompts"]),
                f"{100 * (values[-1] - values[0]):+.1f}",
                ", ".join(f"{step}: {value:.3f}" for step, value in run["curve"].items()),
            ]
            for run in policies
            for values in [list(run["curve"].values())]
        ]
        parts.append(table(header, lines, as_markdown=options.markdown))
    found = {
        path.name: run
        for kind in ("reward_*", "rate_*", "size_*")
        for path in sorted(options.work.glob(kind))
        if (run := figures_of(path))
    }
    if found:
        header = ["run", "steps", "held out", "longer wins", "bag of words", "loss", "training"]
        lines = [
            [
                name,
                str(run["steps"]),
                share(run["accuracy"], run["pairs"]),
                *(
                    f"{run[key]:.3f}" if key in run else ""
                    for key in ("longer_wins_baseline", "bag_of_words_baseline", "loss")
                ),
                f"{run['train_accuracy']:.3f}",
            ]
            for name, run in found.items()
        ]
        parts.append(table(header, lines, as_markdown=options.markdown))
    for name, of_run in {
        "policy_*": lines_of_policy_sweep,
        "tools": lines_of_tools,
        "judge_*": lines_of_judge,
        "resume_*": lines_of_resume,
        "placement_*": lines_of_placement,
        "vllm": lines_of_vllm,
        "pushed_*": lines_of_pushed,
        "best_of": lines_of_best_of,
    }.items():
        there = {
            path.name: run for path in sorted(options.work.glob(name)) if (run := figures_of(path))
        }
        if there:
            header, *lines = of_run(there)
            parts.append(table(header, lines, as_markdown=options.markdown))
    return "\n\n".join(parts)


def lines_of_tools(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each validation, the shares."""
    (run,) = runs.values()
    return [
        ["step", *TOOL_FIGURES],
        *(
            [step, *(f"{figures[name]:.3f}" for name in TOOL_FIGURES)]
            for step, figures in run["curve"].items()
        ),
    ]


def lines_of_judge(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each way to ask: agreement beside length, and how much of it is the position."""
    lines = [["run", "right", "longer wins", "without a score", "follow the position"]]
    for name, run in runs.items():
        final, asked = run["found"]["final"], run["found"]["judge"]
        shares = (final["value"], final["longer_wins"], asked.get("position_flips"))
        right, longer, flips = ("none" if one is None else f"{one:.3f}" for one in shares)
        failed = f"{run['found']['num_failures']} of {run['found']['num_completions']}"
        lines.append([name, right, longer, failed, flips])
    return lines


def lines_of_best_of(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """How often the best of 16 is right, beside one at random and beside any of them."""
    (run,) = runs.values()
    figures = [*run["found"]["sections"], run["found"]["final"]]
    return [
        [figure["name"] for figure in figures],
        [share(figure["value"], figure["num_rows"]) for figure in figures],
    ]


def lines_of_resume(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each run, when it was killed, and whether it ended as the other did."""
    return [
        ["run", "killed", "files of weights that are the same", "losses are the same"],
        *(
            [
                name,
                ", ".join(run["seconds"]),
                f"{sum(run['same_files'].values())} of {len(run['same_files'])}",
                str(run["same_losses"]),
            ]
            for name, run in runs.items()
        ),
    ]


def lines_of_policy_sweep(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each run, held-out answers that are right in the end, and rewards on the way."""
    return [
        ["run", "right", "rewards", "largest gradient", "entropy at first, in the end"],
        *(
            [
                name.removeprefix("policy_"),
                share(run["right"], run["prompts"]),
                ", ".join(f"{reward:.2f}" for reward in run["rewards"]),
                f"{max(run['grad_norms']):.1f}",
                f"{run['entropy'][0]:.2f}, {run['entropy'][-1]:.2f}",
            ]
            for name, run in runs.items()
        ),
    ]


def lines_of_placement(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each place, losses beside those of one process, and what each process held."""
    lines = [["run", "losses", "largest difference", "GiB of each process", "seconds of a step"]]
    for name, run in runs.items():
        kind = name.split("_")[1]
        here = runs.get(f"placement_{kind}_one_process", run)["losses"]
        apart = max(abs(a - b) for a, b in zip(run["losses"], here, strict=True))
        lines.append(
            [
                name.removeprefix("placement_"),
                ", ".join(f"{loss:.6f}" for loss in run["losses"]),
                f"{apart:.1e}",
                ", ".join(f"{size:.2f}" for size in run["gib"].values()),
                ", ".join(f"{seconds:.1f}" for seconds in run["step_seconds"]),
            ]
        )
    return lines


def lines_of_vllm(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of each step, how far the engine's probabilities are from the learner's."""
    (run,) = runs.values()
    keys = ("token_mult_prob_error", "token_mult_prob_error_max", "gen_kl_error", "reward")
    return [
        ["step", *keys],
        *(
            [str(step), *(f"{run[key][step - 1]:.3g}" for key in keys)]
            for step in range(1, 1 + len(run["reward"]))
        ),
    ]


def lines_of_pushed(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of some steps of each run: reward, known answers, divergence, length, and alarms so far."""
    keys = {
        "reward": "train/reward",
        "right": "env/judged/math/accuracy",
        "KL": "train/kl_penalty",
        "entropy": "train/entropy",
        "length": "train/mean_gen_tokens_per_sample",
    }
    lines = [["run", "step", *keys, "alarms"]]
    for name, run in runs.items():
        steps = run["steps"]
        for line in steps[:: max(1, len(steps) // 5)]:
            alarms = [key for key, value in line.items() if key.startswith("health/") and value]
            shown = [f"{line[key]:.3f}" if key in line else "" for key in keys.values()]
            lines.append([name, str(line["step"]), *shown, ", ".join(alarms)])
    return lines


def share(value: float, count: int) -> str:
    """A share with its 95 % interval."""
    from laurel.extensions.evaluation.accuracy import (
        interval_of_share,
    )

    low, high = interval_of_share(round(value * count), count)
    return f"{value:.3f} ({low:.3f} to {high:.3f}) of {count}"


if __name__ == "__main__":
    main()

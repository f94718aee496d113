"""Runs one of the three commands of fifteen minutes on a machine with one GPU (docs/gpu.md).

    python3 benchmarks/gpu_day/day.py 1 --prepared gpu_day --out results
    python3 benchmarks/gpu_day/day.py 2 --prepared gpu_day --out results
    python3 benchmarks/gpu_day/day.py 3 --prepared gpu_day --out results

Each step is a program with a time limit, the most wanted first. What it measures is in `--out` at
once: `steps.jsonl` (how each step ended), `tests.jsonl`, `trial.json`, `speed.jsonl`, metrics of
runs, and all that was printed in `log-N.txt`. `report.py` makes tables of them.
`--device cpu --tiny` rehearses a command in small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCHMARKS, ROOT = HERE.parent, HERE.parents[1]
LEAST = 10.0
"""Seconds below which a step is not begun."""
NO_JUDGE = "no reward model was trained"
FIRST_TESTS = ("tests/gpu/test_cascade_gpu.py", "tests/gpu/test_policy_gpu.py")

TINY_RUN = (
    "cluster.device=cpu",
    "cluster.cpu_threads=1",
    "policy.precision=float32",
    "policy.train_global_batch_size=4",
    "policy.max_total_sequence_length=256",
    "policy.sequence_packing.train_mb_tokens=1024",
)
TINY_REWARD_MODEL = ("rm.max_num_steps=1", "rm.val_at_end=false")
TINY_GRPO = (
    "grpo.max_num_steps=1",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "policy.generation.max_new_tokens=4",
    "data.max_input_seq_length=200",
    "env.reward_model.precision=float32",
    "env.reward_model.max_model_len=256",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A program of the day."""

    name: str
    seconds: float
    """Its time limit."""
    command: Sequence[str]
    lacks: str | None = None
    """Why it cannot run; None if it can."""
    metrics: Path | None = None
    """The directory with the metrics of its run, which go to the results when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The folders and the device of a day."""

    out: Path
    work: Path
    """What the first command unpacks and trains, and later ones need."""
    device: str
    is_tiny: bool

    def steps(self, number: int) -> Iterator[Step]:
        """Yield the steps of a command in order of their value, each when the last has ended."""
        return {1: self._first, 2: self._second, 3: self._third}[number]()

    def _first(self) -> Iterator[Step]:
        yield Step(name="attention and head", seconds=110, command=self._tests(*FIRST_TESTS))
        # The trial has a step of its own.
        others = [*(f"--ignore={path}" for path in FIRST_TESTS), "-k", "not test_the_trial_passes"]
        yield Step(name="tests/gpu", seconds=110, command=self._tests("tests/gpu", *others))
        trial = ["doctor", "--trial", "--minutes", "0.02" if self.is_tiny else "1.5"]
        report = str(self.out / "trial.json")
        yield Step(name="trial", seconds=120, command=laurel(*trial, "--report", report))

    def _second(self) -> Iterator[Step]:
        forests = [
            "--ways",
            "forest",
            "--workload",
            "2x2:16+4" if self.is_tiny else "8x16:1024+256",
        ]
        compared = ["--phases", "training,scoring", *forests]
        sampled = [
            "--phases",
            "generation",
            "--workload",
            "2x2:16+4" if self.is_tiny else "4x16:1024+64",
        ]
        eager, liger = (["--layers", name, *compared] for name in ("eager", "liger"))
        yield Step(name="head", seconds=50, command=self._speed("--phases", "head"))
        phases = self._speed("--phases", "training,scoring,log-probs", *forests)
        yield Step(name="speed", seconds=120, command=phases)
        # With graphs and without.
        yield Step(name="sampling", seconds=60, command=self._speed(*sampled))
        yield Step(name="eager layers", seconds=60, command=self._speed(*eager))
        yield Step(
            name="Liger's layers",
            seconds=60,
            command=self._speed(*liger),
            lacks=missing("liger_kernel"),
        )
        directory, gguf = self.work / "model", self.work / "model.gguf"
        model = directory if directory.exists() else gguf
        trained, policy = self.work / "reward_model", self.work / "policy"
        pairs = self.work / "pairs.jsonl.gz"
        yield Step(
            name="reward model",
            seconds=90,
            command=run(
                "rm",
                "reward_model.yaml",
                f"policy.model_name={model}",
                f"data.train_data_path={pairs}",
                f"data.val_data_path={self.work / 'validation.jsonl.gz'}",
                f"checkpointing.checkpoint_dir={trained}",
                f"logger.log_dir={trained / 'logs'}",
                *((*TINY_RUN, *TINY_REWARD_MODEL) if self.is_tiny else ()),
            ),
            lacks=None if model.exists() else "no model was prepared",
            metrics=trained / "logs",
        )
        judge = newest(trained)
        yield Step(
            name="GRPO",
            seconds=90,
            command=run(
                "grpo",
                "grpo.yaml",
                f"policy.model_name={model}",
                f"env.reward_model.model_name={judge}",
                f"data.train.data_path={pairs}",
                f"checkpointing.checkpoint_dir={policy}",
                f"logger.log_dir={policy / 'logs'}",
                *((*TINY_RUN, *TINY_GRPO) if self.is_tiny else ()),
            ),
            lacks=None if judge else NO_JUDGE,
            metrics=policy / "logs",
        )

    def _third(self) -> Iterator[Step]:
        few, many = ("1x2:16+2", "2x2:16+2") if self.is_tiny else ("1x8:1024+32", "32x16:1024+32")
        rows = ["--phases", "generation", "--workload", few, "--workload", many]
        yield Step(name="few and many rows", seconds=60, command=self._speed(*rows))
        # As it was prepared, or as Laurel wrote it when it read the file.
        made = [*self.work.glob("model/config.json"), *self.work.glob("cache/gguf/*/config.json")]
        yield Step(
            name="generate_batch",
            seconds=60,
            command=[
                sys.executable,
                str(BENCHMARKS / "generate_batch.py"),
                *("--device", self.device, "--dtype", "bfloat16"),
                *(["--model", str(made[0].parent)] if made else []),
                *("--json", str(self.out / "generate_batch.json")),
                *(["--quick"] if self.is_tiny else []),
            ],
        )
        compared = ["--phases", "training,scoring"]
        flash = ["--attention", "FA4", *compared, "--ways", "forest"]
        yield Step(
            name="FlashAttention 4",
            seconds=60,
            command=self._speed(*flash),
            lacks=missing("flash_attn.cute"),
        )
        forests = self._speed(*compared, "--repeats", "2")
        yield Step(name="forests", seconds=150, command=forests)
        judge = newest(self.work / "reward_model")
        pairs = str(self.work / "validation.jsonl.gz")
        yield Step(
            name="evaluation",
            seconds=60,
            command=laurel("eval", "pairs", "-m", str(judge), "-d", pairs),
            lacks=None if judge else NO_JUDGE,
        )

    def _tests(self, *words: str) -> list[str]:
        # Warnings of torch's compiler are no errors, and variants compile beside each other.
        apart = ["-n", "6"] if self.device == "cuda" and find_spec("xdist") else []
        limit = ["--timeout", "120"] if find_spec("pytest_timeout") else []
        ways = ["-W", "default", "-p", "pytest_lines", "-p", "no:cacheprovider", *apart, *limit]
        return [sys.executable, "-m", "pytest", *ways, *words]

    def _speed(self, *words: str) -> list[str]:
        repeats = [] if "--repeats" in words else ["--repeats", "1" if self.is_tiny else "3"]
        place = ["--device", self.device, "--json", str(self.out / "speed.jsonl")]
        return [sys.executable, str(BENCHMARKS / "gpu.py"), *place, *repeats, "--profile", *words]


def laurel(*words: str) -> list[str]:
    return [sys.executable, "-m", "laurel", *words]


def run(command: str, config: str, *changes: str) -> list[str]:
    return laurel(command, "-c", str(HERE / config), *changes)


def newest(run: Path) -> Path | None:
    """Return the last checkpoint of a run."""
    steps = {int(path.name.removeprefix("step_")): path for path in run.glob("step_*")}
    return steps[max(steps)] if steps else None


def missing(module: str) -> str | None:
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        is_there = False
    return None if is_there else f"{module} is not installed"


def main() -> None:
    options = read_options()
    day = Day(
        out=options.out.resolve(),
        work=options.work.resolve(),
        device=options.device,
        is_tiny=options.tiny,
    )
    for folder in (day.out, day.work):
        folder.mkdir(parents=True, exist_ok=True)
    unpack(options.prepared / str(options.number), day.work)
    # Packages of the day are found by this process too, which asks what is installed.
    sys.path.insert(0, str(day.work / "site"))
    end = time.monotonic() + options.seconds
    with (day.out / f"log-{options.number}.txt").open("a", encoding="utf-8") as log:
        for step in day.steps(options.number):
            if not options.only or step.name in options.only:
                take(step, day, log, left=end - time.monotonic())


def unpack(prepared: Path, work: Path) -> None:
    """Put what was prepared for a command where all commands find it, and unpack it there."""
    for file in sorted(prepared.glob("*")):
        shutil.copyfile(file, work / file.name)
        if file.name == "site.tar.xz":
            with tarfile.open(file) as archive:
                archive.extractall(work / "site", filter="data")
        if file.name == "model.1":
            if not (work / "model.0").exists():
                raise SystemExit(f"{work} has nothing of the first command: begin with it here")
            with (work / "model.gguf").open("wb") as model:
                for piece in ("model.0", "model.1"):
                    model.write((work / piece).read_bytes())
    whole = work / "model.gguf"
    if whole.exists() and tarfile.is_tarfile(whole):
        with tarfile.open(whole) as archive:
            archive.extractall(work / "model", filter="data")
        whole.unlink()


def take(step: Step, day: Day, log: Any, *, left: float) -> None:
    """Run a step, and write down when it begins and how it ends."""
    # A rehearsal asks whether a step runs, on a CPU that may be busy.
    limit = min(step.seconds * (5 if day.is_tiny else 1), left)
    lacks = step.lacks or ("no time is left" if limit < LEAST else None)
    if lacks:
        note(day, step, status="skipped", why=lacks)
        return
    note(day, step, status="begun")
    log.write(f"\n{'=' * 20} {step.name}: {' '.join(step.command)}\n")
    log.flush()
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(day),
        process_group=0,
    )

    def stop(number: int, _: object) -> None:
        kill(process)
        note(day, step, status=f"stopped by signal {number}", seconds=time.monotonic() - started)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait(timeout=limit)
        status = "done" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        kill(process)
        status = f"cut off after {limit:.0f} s"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for file in step.metrics.glob("*/metrics.jsonl") if step.metrics else ():
        shutil.copy(file, day.out / f"metrics-{step.name.replace(' ', '_')}.jsonl")
    note(day, step, status=status, seconds=time.monotonic() - started)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a step with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def note(day: Day, step: Step, **how: Any) -> None:
    seconds = how.get("seconds")
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    print(
        f"{step.name}: {how['status']}{took}{': ' + how['why'] if 'why' in how else ''}", flush=True
    )
    with (day.out / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step.name, **how}) + "\n")


def environment(day: Day) -> dict[str, str]:
    """Return the variables of a step: packages of the day before this checkout, and no network."""
    paths = [day.work / "site", ROOT / "src", HERE, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "LINES": str(day.out / "tests.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        # What is compiled, or made of the model's file, stays for the next step.
        "LAUREL_CACHE": str(day.work / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(day.work / "inductor"),
        "TRITON_CACHE_DIR": str(day.work / "triton"),
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("number", type=int, choices=[1, 2, 3], help="which of the three commands")
    add("--prepared", type=Path, default=Path("gpu_day"), help="what prepare.py wrote")
    add("--out", type=Path, default=Path("benchmark_results/gpu_day"), help="for the results")
    add("--work", type=Path, default=Path("/tmp/laurel_gpu_day"), help="the same for all commands")
    add("--seconds", type=float, default=330.0, help="of the whole command")
    add("--only", nargs="+", metavar="STEP", help="only these steps")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--tiny", action="store_true", help="sizes for a rehearsal")
    return parser.parse_args()


if __name__ == "__main__":
    main()

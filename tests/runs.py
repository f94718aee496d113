"""Tiny training runs: preference files, settings, and `laurel rm` here or in a process."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import LaurelError
from laurel.models.loading.pretrained import train_tokenizer
from laurel.observe.loggers import read_metrics
from laurel.run import grpo, reward_model
from laurel.run.reward_model import train_reward_model
from laurel.training.loop import RunOutcome
from laurel.training.stopping import Deadline
from processes import forking

ROOT = Path(__file__).parents[1]

GOOD = ("clear", "kind", "right", "useful")
BAD = ("vague", "rude", "wrong", "useless")

TINY = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=16",
    "policy.scratch.num_layers=1",
    "policy.scratch.num_heads=2",
    "policy.scratch.vocab_size=400",
    "policy.precision=float32",
    "policy.max_total_sequence_length=128",
    "policy.train_global_batch_size=8",
    "policy.optimizer.kwargs.lr=3e-3",
    "rm.val_period=5",
    "checkpointing.save_period=5",
    "logger.num_val_samples_to_print=1",
    "cluster.cpu_threads=1",
    "cluster.device=cpu",
)
"""A model of a few thousand weights on the CPU, and steps that take milliseconds."""

LOADED = tuple(c for c in TINY if not c.startswith(("policy.scratch", "policy.model_name")))
"""The same for a model that is loaded."""


def pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for `BinaryPreferenceDataset` that follow a rule: the answer with a good word wins."""
    drawn = random.Random(seed)

    def answer(words: Sequence[str]) -> str:
        filler = " ".join(drawn.choice(("this", "is", "one", "more")) for _ in range(3))
        return f"{filler} {drawn.choice(words)} {drawn.choice(('answer', 'reply'))}"

    return [
        {"prompt": f"question {seed}-{i}?", "chosen": answer(GOOD), "rejected": answer(BAD)}
        for i in range(count)
    ]


def ranked(prompt: str, answers: dict[str, int], **extra: Any) -> dict[str, Any]:
    """A row for `PreferenceDataset`: each answer and its rank."""
    return {
        "context": [{"role": "user", "content": prompt}],
        "completions": [
            {"rank": rank, "completion": [{"role": "assistant", "content": text}]}
            for text, rank in answers.items()
        ],
        **extra,
    }


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A JSON lines file of rows; texts are written as they are."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def dialogue_rows() -> list[object]:
    """Pairs of eight dialogues, each going on from the last, which are far apart in the file."""
    turns = [
        {"role": role, "content": f"{role} says what it has to say " * (number + 2)}
        for number in range(3)
        for role in ("user", "assistant")
    ]
    return [
        {
            "context": [{"role": "user", "content": f"dialogue {dialogue}"}, *turns[1:end]],
            "completions": [
                {"rank": rank, "completion": [{"role": "assistant", "content": f"{word} {end}"}]}
                for rank, word in enumerate((GOOD[0], BAD[0]))
            ],
        }
        for end in (1, 3, 5)
        for dialogue in range(8)
    ]


DIALOGUES = (
    "data.dataset_name=PreferenceDataset",
    "data.split_validation_size=0",
    *("policy.train_global_batch_size=6", "policy.max_total_sequence_length=512"),
    *("rm.val_period=0", "checkpointing.keep_top_k=null"),
)
"""Settings for `dialogue_rows`, of which a step has two whole dialogues if they are brought
together."""


def settings(directory: Path, *changes: str, rows: Path | None = None) -> list[str]:
    """Overrides of a tiny run that writes below `directory`; 40 pairs where no rows are given."""
    if rows is None:
        rows = directory / "train.jsonl"
        if not rows.exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_rows(rows, pairs(40))
    data = (
        ()
        if any(c.startswith("data.train") for c in changes)
        else (
            "data.dataset_name=BinaryPreferenceDataset",
            f"data.train_data_path={rows}",
            "data.split_validation_size=0.2",
        )
    )
    places = (f"checkpointing.checkpoint_dir={directory}/saves", f"logger.log_dir={directory}/logs")
    return [*TINY, *data, *places, *changes]


def save_model(directory: Path, *, num_labels: int | None = None, **changes: Any) -> Path:
    """A tiny model as Hugging Face saves it: a language model, or a classifier."""
    tokenizer = train_tokenizer(
        (text for row in pairs(12) for text in row.values()), vocab_size=400
    )
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    factory: Any = AutoModelForCausalLM
    if num_labels is not None:
        config.num_labels, factory = num_labels, AutoModelForSequenceClassification
    torch.manual_seed(0)
    factory.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that ended here, and what it said."""

    outcome: RunOutcome
    text: str


def train(overrides: Sequence[str]) -> Finished:
    """Run `laurel rm` in this process."""
    loaded = load_config(RewardTrainingRun, None, list(overrides))
    stream = StringIO()
    console = Console(file=stream, width=200, markup=False, emoji=False, highlight=False)
    outcome = train_reward_model(loaded.config, console=console)
    return Finished(outcome=outcome, text=stream.getvalue())


def command(overrides: Sequence[str], *, program: Sequence[str] = ()) -> list[str]:
    """The command line of `laurel rm`, or of another program with the same arguments."""
    return [sys.executable, *(program or ("-m", "laurel.cli.main", "rm")), *overrides]


def start(
    overrides: Sequence[str], *, log: Path, program: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start `laurel rm`; what it prints goes to a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command(overrides, program=program),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )


def run(
    overrides: Sequence[str], *, program: Sequence[str] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `laurel rm`, or another program, to its end, in a process that starts with torch loaded.

    `start` starts one as people do.
    """
    arguments = command(overrides, program=program)
    if arguments[1] in ("-m", "-c") or not arguments[1].startswith("-"):
        return warm_python()(arguments, cwd or Path.cwd())
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment()
    )


def laurel(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `laurel` with these arguments to its end."""
    return run(arguments, program=("-m", "laurel.cli.main"))


def laurel_here(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `laurel` with these arguments in this process: a process for each takes seconds."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    status, stderr, error = result.exit_code, result.stderr, result.exception
    if isinstance(error, LaurelError):  # what `main` makes of it
        status, stderr = error.exit_code, f"{stderr}error: {error}\n"
    elif error is not None and not isinstance(error, SystemExit):
        raise error
    return subprocess.CompletedProcess(list(arguments), status, result.stdout, stderr)


class WarmPython:
    """Forks processes from one that has loaded torch (`warm_cli.py`), which takes seconds."""

    patience = 300.0
    """Seconds until a process is killed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="laurel-warm-")
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_cli.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | forking(environment()),
        )
        atexit.register(self.close)

    def __call__(self, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of this Python to its end."""
        files = {name: Path(self._folder.name, name) for name in ("stdout", "stderr")}
        for file in files.values():
            file.unlink(missing_ok=True)  # whoever outlives its command may still write into it
            file.touch()
        job = {
            "arguments": command[1:],
            "folder": str(folder),
            "environment": environment(),
            **{name: str(file) for name, file in files.items()},
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        process = int(self._server.stdout.readline())
        begun = time.monotonic()
        killer = threading.Timer(self.patience, os.kill, (process, signal.SIGKILL))
        killer.start()
        status = int(self._server.stdout.readline())
        killer.cancel()
        if time.monotonic() >= begun + self.patience:
            raise subprocess.TimeoutExpired(command, self.patience)
        texts = (file.read_text(encoding="utf-8") for file in files.values())
        return subprocess.CompletedProcess(command, status, *texts)

    def close(self) -> None:
        """End the process that the others are forked from."""
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()


warm_python = cache(WarmPython)
"""That of this process of the tests."""


def environment() -> dict[str, str]:
    """One thread, a fixed width, no network; modules of the tests can be imported."""
    python_path = (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Look again and again, hundreds of times a second.

    Raises:
        AssertionError: The process ended first, or five minutes passed.
    """
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, f"the run ended first, with {process.returncode}"
        assert time.monotonic() < deadline, "nothing happened for five minutes"
        time.sleep(0.002)


@contextmanager
def budget_that_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A time budget of ten minutes, of which the run soon finds that hardly more is left than the
    share that is kept for a save. At the end, that it was kept to."""
    looks = itertools.count()

    def clock() -> float:
        return time.monotonic() + (515.0 if next(looks) > 5 else 0.0)

    begun = time.monotonic()
    for kind in (reward_model, grpo):
        monkeypatch.setattr(kind, "Deadline", partial(Deadline, clock=clock))
    yield "checkpointing.checkpoint_must_save_by=00:00:10:00"
    assert clock() < begun + 600, "it was saved too late"


def last_step(directory: Path) -> int:
    """The last step in the metrics of the first run below `directory`; 0 where there is none."""
    path = directory / "logs" / "exp_001" / "metrics.jsonl"
    if not path.exists():
        return 0
    return max((int(line["step"]) for line in read_metrics(path)), default=0)


def series(directory: Path, name: str, *, run: str = "exp_001") -> dict[int, float]:
    """One metric of a run, by step."""
    lines = read_metrics(directory / "logs" / run / "metrics.jsonl")
    return {int(line["step"]): line[name] for line in lines if name in line}


_EQUAL_FILES = (
    *("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"),
    *("scoring.json", "training_state.json"),
)


def manifest_hashes(checkpoint: Path) -> dict[str, str]:
    """Hashes of what must be equal in equal runs: weights, tokenizer, contract, optimizer."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))
    records = manifest["files"]
    named = records.items() if isinstance(records, dict) else ((r["name"], r) for r in records)
    return {
        name: record["sha256"]
        for name, record in named
        if name.endswith((".safetensors", ".jinja", *_EQUAL_FILES))
    }


def metric_of(checkpoint: Path) -> float | None:
    """What a checkpoint is ranked by."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))
    metric = manifest["metric"]
    return None if metric is None else float(metric)


def best_name(finished: Finished) -> str:
    """The name of the best checkpoint of a run."""
    assert finished.outcome.best is not None
    return finished.outcome.best.name


def assert_equal_runs(
    straight: Path,
    broken: Path,
    *,
    last: int,
    common: tuple[int, ...] = (),
    same_validations: bool = False,
) -> None:
    """Every step and the checkpoints in common are the same, to the last bit.

    Args:
        straight: A run that was never interrupted.
        broken: The same run, interrupted.
        last: Its last step.
        common: Steps before it that both have saved.
        same_validations: Whether both validated at the same steps.
    """
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/global_valid_toks"):
        found, expected = series(broken, name), series(straight, name)
        assert sorted(expected) == list(range(1, last + 1))
        assert found == expected, name
    if same_validations:
        for name in ("validation-default/loss", "validation-default/rewards_mean"):
            assert series(broken, name) == series(straight, name), name
    for step in (*common, last):
        expected = manifest_hashes(straight / "saves" / f"step_{step}")
        assert "model.safetensors" in expected
        assert "training/optimizer.safetensors" in expected
        assert manifest_hashes(broken / "saves" / f"step_{step}") == expected, step

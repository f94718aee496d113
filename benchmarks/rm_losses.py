"""Are the losses of `laurel rm` those of TRL's RewardTrainer, step by step, with a real model?

    python benchmarks/rm_losses.py --peer-python PEER/bin/python

Both start from one saved classifier (the model, and a head from a fixed seed), read the same pairs
in the same order, and take the same steps: AdamW as Laurel sets it, a constant rate, clipping at
norm 1, float32. (With torch's epsilon of 1e-8 and twice the rate the losses come apart by 2.0e-3 in
20 steps.) The program fails where a loss of any step differs by more than `--bound`, or where the
accuracy of one trained model on held-out pairs is outside of the other's 95 % interval. A side that
is done already is not run again: its losses lie in `--work`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import (
    DATA_SETS,
    choose,
    data_set,
    load_rows,
    save_pretrained_classifier,
    write_conversational,
)
from rounds import machine, table, write_json

from laurel.extensions.evaluation.accuracy import interval_of_share

HERE = Path(__file__).parent
BETAS, EPS, CLIP = (0.9, 0.98), 1e-5, 1.0


def main() -> None:
    options = read_options()
    dataset = data_set(options.data)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows, model = work / "rows.jsonl", work / "model"
    if not rows.is_file():
        usable = [row for row in load_rows(dataset) if letters(row) <= options.letters]
        trained = choose(usable, options.pairs * options.steps)
        write_conversational(trained, rows)
        held_out = [row for row in usable if row not in trained]
        write_conversational(choose(held_out, options.held_out), work / "held_out.jsonl")
    if not (model / "config.json").is_file():
        save_pretrained_classifier(options.model, model)
    ours = laurel_losses(model, rows, work, options)
    theirs = trl_losses(model, rows, work, options)
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    worst = max(differences)
    lines = [
        [str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"]
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1)
    ]
    header = ["step", "Laurel", "TRL", "difference"]
    print(table(header, lines, as_markdown=options.markdown))
    print(f"\nlargest difference of {len(ours)} steps: {worst:.2e} (bound {options.bound:g})")
    accuracies = {
        name: accuracy(directory, work)
        for name, directory in (
            ("before", model),
            ("Laurel", work / "run" / f"step_{options.steps}"),
            ("TRL", work / "trl_model"),
        )
    }
    for name, (value, low, high) in accuracies.items():
        print(f"held-out pairs in order, {name}: {value:.3f} ({low:.3f} to {high:.3f})")
    write_json(
        options.json,
        {
            "machine": machine(),
            "options": vars(options),
            "laurel": ours,
            "trl": theirs,
            "worst": worst,
            "accuracies": accuracies,
        },
    )
    _, low, high = accuracies["Laurel"]
    if worst > options.bound or not low <= accuracies["TRL"][0] <= high:
        raise SystemExit(1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    add("--peer-python", required=True, help="interpreter of an environment that has trl")
    add("--data", default="ukp_convarg1", choices=list(DATA_SETS))
    add("--letters", type=int, default=350, help="the most letters of a pair, for short steps")
    add("--pairs", type=int, default=4, help="pairs of a step")
    add("--steps", type=int, default=20)
    add("--held-out", type=int, default=100, help="pairs that both trained models are tried on")
    add("--lr", type=float, default=1e-5)
    add("--bound", type=float, default=1e-3)
    add("--threads", type=int, default=1)
    add("--work", type=Path, default=Path("benchmark_results/rm_losses"))
    add("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/rm_losses.json"))
    return parser.parse_args()


def letters(row: Any) -> int:
    group = row.group
    turns = [*group.prompt, *(m for one in group.completions_G for m in one.messages)]
    return sum(len(turn.content) for turn in turns)


def laurel_losses(model: Path, rows: Path, work: Path, options: argparse.Namespace) -> list[float]:
    """Run `laurel rm` over the file in its order, and return the loss of each step."""
    logs = work / "logs"
    found = sorted(logs.rglob("metrics.jsonl"))
    if not found:
        settings = {
            "policy.model_name": str(model),
            "policy.precision": "float32",
            "policy.max_total_sequence_length": 1024,
            "policy.sequence_packing.train_mb_tokens": 256,
            "policy.train_global_batch_size": options.pairs,
            "policy.max_grad_norm": CLIP,
            "policy.optimizer": json.dumps(
                {
                    "name": "torch.optim.AdamW",
                    "kwargs": {"lr": options.lr, "weight_decay": 0.0, "betas": BETAS, "eps": EPS},
                }
            ),
            "data.train_data_path": str(rows),
            "data.shuffle": "false",
            "rm.val_period": 0,
            "checkpointing.checkpoint_dir": str(work / "run"),
            "checkpointing.metric_name": "null",
            "logger.log_dir": str(logs),
            "cluster.cpu_threads": options.threads,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        subprocess.run([sys.executable, "-m", "laurel.cli.main", "rm", *words], check=True)
        found = sorted(logs.rglob("metrics.jsonl"))
    lines = map(json.loads, found[-1].read_text(encoding="utf-8").splitlines())
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return [losses[step] for step in sorted(losses)]


def trl_losses(model: Path, rows: Path, work: Path, options: argparse.Namespace) -> list[float]:
    """Run the trainer in its own environment, and return the loss of each step."""
    written = work / "trl_losses.json"
    if not written.is_file():
        settings = {
            "model": str(model),
            "rows": str(rows),
            "pairs": options.pairs,
            "steps": options.steps,
            "lr": options.lr,
            "betas": BETAS,
            "eps": EPS,
            "clip": CLIP,
            "threads": options.threads,
            "work": str(work),
            "written": str(written),
        }
        peer = str(HERE / "peers" / "trl_losses.py")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [options.peer_python, peer, json.dumps(settings)]
        subprocess.run(command, check=True, env=environment)
    losses: list[float] = json.loads(written.read_text(encoding="utf-8"))
    return losses


def accuracy(model: Path, work: Path) -> tuple[float, float, float]:
    """The share of the held-out pairs that a model orders as people did, with its 95 % interval."""
    asked = ("pairs", "-m", str(model), "-d", str(work / "held_out.jsonl"), "--device", "cpu")
    command = [sys.executable, "-m", "laurel.cli.main", "eval", *asked, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    final = json.loads(done.stdout)["final"]
    count = final["num_rows"]
    return final["value"], *interval_of_share(round(final["value"] * count), count)


if __name__ == "__main__":
    main()

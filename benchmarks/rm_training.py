"""Pairs per second of reward-model training: Laurel against TRL's RewardTrainer, on real pairs.

    python benchmarks/rm_training.py --peer-python /path/to/venv-with-trl/bin/python
    python benchmarks/rm_training.py --data hh_rlhf_harmless --dialogues --variants prompts laurel

Same initial weights, same rows, same batch, dtype and threads; see README.md for how it measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import (
    DATA_DIR,
    DATA_SETS,
    TINY_SHAPE,
    TRAINING_SHAPE,
    DataSet,
    choose,
    choose_dialogues,
    load_rows,
    missing_data,
    save_model,
    save_pretrained_classifier,
    shape_of,
    texts_of,
    write_conversational,
)
from rounds import Worker, add_clock, machine, run_rounds, seconds_of, spread, table, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train."""

    label: str
    peer: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    shares: str = "all"
    """What rows that begin alike share: `all`, their `prompts`, or `nothing`."""


PADDED = {"sequence_packing": {"enabled": False}}
VARIANTS = {
    "trl": Variant(label="TRL RewardTrainer, as shipped", peer=True),
    "trl-keep": Variant(
        label="TRL, checkpointing off", peer=True, overrides={"gradient_checkpointing": False}
    ),
    "laurel": Variant(label="Laurel"),
    "prompts": Variant(label="Laurel, prompts shared alone", shares="prompts"),
    "recompute": Variant(
        label="Laurel, checkpointing on",
        overrides={"dtensor_cfg": {"activation_checkpointing": True}},
    ),
    "unshared": Variant(label="Laurel, nothing shared", shares="nothing"),
    "dynamic": Variant(
        label="Laurel, packing off, dynamic batching",
        overrides={"sequence_packing": {"enabled": False, "train_mb_tokens": 8 * 8192}},
    ),
    "padded": Variant(label="Laurel, packing off", overrides=PADDED),
}
MAIN = ("trl", "trl-keep", "laurel")
OWN = tuple(name for name, variant in VARIANTS.items() if not variant.peer)


def main() -> None:
    options = read_options()
    missing = missing_data(options.data)
    if missing:
        print(
            f"skipped: {', '.join(missing)} not found in {DATA_DIR} (set LAUREL_DATA)",
            file=sys.stderr,
        )
    names = [name for name in options.data if name not in missing]
    if not names:
        raise SystemExit("no data: nothing was measured")
    if options.peer_python is None:
        print("no --peer-python: TRL is left out, there is no ratio to it", file=sys.stderr)
    result: dict[str, Any] = {"machine": machine(), "options": vars(options), "data": {}}
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        model_dir = Path(scratch) / "model"
        if options.model:
            save_pretrained_classifier(options.model, model_dir)
            shape = shape_of(model_dir)
        else:
            shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
            texts = (text for name in names for text in texts_of(DATA_SETS[name].path))
            save_model(model_dir, shape, texts)
        for name in names:
            measured = measure(DATA_SETS[name], options, model_dir, Path(scratch))
            result["data"][name] = measured
            print(report(DATA_SETS[name], measured, options), flush=True)
    result["linear_parameters"] = shape.linear_parameters
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--peer-python", help="interpreter of an environment that has trl")
    add(
        "--data",
        nargs="+",
        default=list(DATA_SETS),
        choices=list(DATA_SETS),
        metavar="NAME",
        help=f"data sets: {', '.join(DATA_SETS)}",
    )
    add(
        "--variants",
        nargs="+",
        default=list(MAIN),
        choices=list(VARIANTS),
        metavar="NAME",
        help=f"ways to train: {', '.join(VARIANTS)}; the default is {', '.join(MAIN)}",
    )
    add("--model", help="a directory or a hub name, in place of a model of random weights")
    add("--own-variants", action="store_true", help="all of Laurel's ways, without the peer")
    add(
        "--dialogues",
        action="store_true",
        help="rows of whole dialogues, as `data.group_by_prefix` brings them into a step",
    )
    add("--rounds", type=int, default=3, help="repeats of each; the others once")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--threads", type=int, default=2)
    add("--micro-batch", type=int, default=8, help="pairs of a padded pass (TRL's default: 8)")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/rm_training.json"))
    options = parser.parse_args()
    if options.own_variants:
        options.variants = list(OWN)
    if options.peer_python is None:
        options.variants = [name for name in options.variants if not VARIANTS[name].peer]
    if options.quick:
        options.rounds = 1
        options.micro_batch = 4
    return options


def measure(
    dataset: DataSet, options: argparse.Namespace, model_dir: Path, scratch: Path
) -> dict[str, Any]:
    """Start a worker for every variant, measure them in turn."""
    batch_pairs = 4 if options.quick else dataset.batch_pairs
    steps = 1 if options.quick else dataset.steps
    rows_path = scratch / f"{dataset.name}.jsonl"
    pick = choose_dialogues if options.dialogues else choose
    write_conversational(pick(load_rows(dataset), batch_pairs * steps), rows_path)
    settings = {
        "rows": str(rows_path),
        "model": str(model_dir),
        "batch_pairs": batch_pairs,
        "micro_batch_pairs": min(options.micro_batch, batch_pairs),
        "probe_pairs": 4,
        "dtype": options.dtype,
        "threads": options.threads,
        "scratch_dir": str(scratch / "output"),
    }
    print(f"{dataset.name}: {steps} steps of {batch_pairs} pairs", file=sys.stderr)
    workers: list[Worker] = []
    try:
        for name in options.variants:
            variant = VARIANTS[name]
            workers.append(
                Worker.start(
                    name,
                    "trl_reward.py" if variant.peer else "laurel_reward.py",
                    options.peer_python if variant.peer else sys.executable,
                    {
                        **settings,
                        "overrides": variant.overrides,
                        "shares": variant.shares,
                    },
                    scratch,
                )
            )
        for worker in workers:
            worker.facts = worker.listen(scratch)
        check_same_problem(workers)
        run_rounds(
            workers,
            steps=steps,
            rounds=dict.fromkeys(options.variants, options.rounds),
            log_dir=scratch,
        )
    finally:
        for worker in workers:
            worker.stop()
    return {
        "pairs": batch_pairs * steps,
        "workers": {w.name: {"facts": w.facts, "repeats": w.repeats} for w in workers},
    }


def check_same_problem(workers: list[Worker]) -> None:
    """All programs read the same tokens and start from the same loss, or nothing is comparable."""
    first = workers[0].facts
    tolerance = 1e-4 if first["dtype"] == "float32" else 2e-2
    for worker in workers[1:]:
        for key in ("rows", "sequence_tokens", "dtype", "threads"):
            if worker.facts[key] != first[key]:
                raise SystemExit(
                    f"{worker.name} has {key}={worker.facts[key]}, {workers[0].name} {first[key]}"
                )
        if abs(worker.facts["first_loss"] - first["first_loss"]) > tolerance:
            raise SystemExit(
                f"{worker.name} starts from a loss of {worker.facts['first_loss']:.6f}, "
                f"{workers[0].name} from {first['first_loss']:.6f}"
            )


def report(dataset: DataSet, measured: dict[str, Any], options: argparse.Namespace) -> str:
    workers, pairs = measured["workers"], measured["pairs"]
    seconds = {
        name: [seconds_of(repeat, options.clock) for repeat in worker["repeats"]]
        for name, worker in workers.items()
    }

    def ratio(name: str, to: str) -> str:
        if to not in seconds:
            return "-"
        return f"{statistics.median(seconds[to]) / statistics.median(seconds[name]):.2f}"

    rows = []
    for name, worker in workers.items():
        repeats = worker["repeats"]
        processor = [seconds_of(repeat, "cpu") for repeat in repeats]
        rows.append(
            [
                VARIANTS[name].label,
                spread([pairs / s for s in seconds[name]]),
                ratio(name, "trl"),
                ratio(name, "trl-keep"),
                f"{1000 * statistics.median(processor) / pairs:.0f}",
                f"{max(r['peak_mib'] for r in repeats):.0f}",
            ]
        )
    header = [
        "program",
        "pairs/s: median (range)",
        "x TRL",
        "x TRL, checkpointing off",
        "CPU ms/pair",
        "peak MiB",
    ]
    facts = next(iter(workers.values()))["facts"]
    distinct = [w["facts"].get("distinct_tokens") for w in workers.values()]
    tokens = facts["sequence_tokens"] / pairs
    title = f"{dataset.name}: {pairs} pairs a repeat, {tokens:.0f} tokens a pair"
    if any(distinct):
        title += f" of which {next(filter(None, distinct)) / pairs:.0f} distinct"
    title += f", {facts['dtype']}, {facts['threads']} threads, {options.clock} time"
    if "trl" in workers and "laurel" in workers:
        title += f"; target: {dataset.target} x TRL"
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


if __name__ == "__main__":
    main()

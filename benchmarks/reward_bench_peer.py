"""RewardBench by rewardbench 0.1.4's own script and by Laurel: same numbers, and how much faster?

    python benchmarks/reward_bench_peer.py --peer-python /path/to/venv-with-rewardbench/bin/python

A reward model with double BOS (its template writes one, its tokenizer adds one) is trained for some
steps on real pairs, or taken with --model; both programs score the rows of RewardBench that are at
hand, once as the reference cuts them and once cut short, so that many rows lose their left end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_DIR, TINY_SHAPE, Shape, save_classifier, texts_of
from rounds import Worker, add_clock, machine, run_rounds, seconds_of, spread, table, write_json

FILES = (
    "llmbar/rewardbench_llmbar.jsonl.gz",
    "humanevalpack/rewardbench_hep.jsonl.gz",
    "mtbench_rewardbench/rewardbench_mtbench.jsonl.gz",
)
SHAPE = Shape(hidden=256, layers=4, heads=8, kv_heads=4, head_size=32, feed_forward=1024)
TOLERANCE = 1e-4
TARGET = 3.0
BOS = "<|bos|>"


def main() -> None:
    options = read_options()
    missing = [
        name for name in (*FILES, "ukp_convarg1/train.jsonl.gz") if not (DATA_DIR / name).is_file()
    ]
    if missing:
        raise SystemExit(f"skipped: no {', '.join(missing)} in {DATA_DIR} (set LAUREL_DATA)")
    if options.peer_python is None:
        raise SystemExit("--peer-python is needed: there is nothing to compare with")
    result: dict[str, Any] = {"machine": machine(), "options": vars(options), "runs": {}}
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as name:
        scratch = Path(name)
        rows = write_rows(scratch / "rows.jsonl", every=options.every)
        model = options.model or train_model(scratch, options)
        peer_model = scratch / "peer_model"
        write_for_older_transformers(Path(model), peer_model)
        for max_length, rounds in ((options.max_length, options.rounds), (options.short, 0)):
            folder = scratch / f"to_{max_length}"
            folder.mkdir()
            found = measure(str(model), peer_model, rows, max_length, rounds, folder, options)
            result["runs"][max_length] = found
            print(report(found, max_length, options), flush=True)
    write_json(options.json, result)
    if not all(one["agrees"] for one in result["runs"].values()):
        raise SystemExit("the two programs do not agree")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--peer-python", help="interpreter of an environment that has rewardbench 0.1.4")
    add("--model", help="a reward model that both can load; default: one is made and trained")
    add("--train-steps", type=int, default=20, help="steps of 32 pairs that it is trained for")
    add("--rounds", type=int, default=3, help="repeats of each, in turn")
    add("--threads", type=int, default=2)
    add("--every", type=int, help="every so many rows only (default: 1, all; --quick: 40)")
    add("--max-length", type=int, default=2048, help="tokens of a row at most (its default: 2048)")
    add("--short", type=int, default=192, help="the same of the second run, which is not timed")
    add("--quick", action="store_true", help="a tiny model, few rows: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/evaluation.md")
    add("--json", type=Path, default=Path("benchmark_results/reward_bench_peer.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.train_steps = 1, 2
    options.every = options.every or (40 if options.quick else 1)
    return options


def write_rows(path: Path, *, every: int) -> Path:
    """The rows that could be rebuilt with their texts, in one file, with an id of their own."""
    rows = []
    for name in FILES:
        with gzip.open(DATA_DIR / name, "rt", encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows[::every]):
            kept = {key: row[key] for key in ("prompt", "chosen", "rejected", "subset")}
            file.write(json.dumps({**kept, "id": str(number)}) + "\n")
    return path


def train_model(scratch: Path, options: argparse.Namespace) -> Path:
    """A Qwen3 classifier whose conversations get BOS twice, after some steps of `laurel rm`."""
    start, run = scratch / "start", scratch / "run"
    texts = [*texts_of(DATA_DIR / "ukp_convarg1" / "train.jsonl.gz"), *row_texts()]
    tokenizer = tokenizer_with_bos(texts)
    shape = replace(TINY_SHAPE if options.quick else SHAPE, vocabulary=len(tokenizer))
    save_classifier(start, shape, tokenizer)
    data = DATA_DIR.resolve() / "ukp_convarg1" / "train.jsonl.gz"
    print(f"training for {options.train_steps} steps", file=sys.stderr)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "laurel",
            "rm",
            f"policy.model_name={start}",
            "policy.precision=float32",
            "policy.train_global_batch_size=32",
            "policy.max_total_sequence_length=2048",
            f"rm.max_num_steps={options.train_steps}",
            "policy.optimizer.kwargs.lr=3e-4",
            "data.dataset_name=BinaryPreferenceDataset",
            f"data.train_data_path={data}",
            f"checkpointing.checkpoint_dir={run}",
            "checkpointing.metric_name=null",
            f"cluster.cpu_threads={options.threads}",
            "cluster.device=cpu",
            f"logger.log_dir={scratch / 'logs'}",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"training failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return run / f"step_{options.train_steps}"


def row_texts() -> Iterable[str]:
    for name in FILES:
        yield from texts_of(DATA_DIR / name)


def tokenizer_with_bos(texts: Iterable[str]) -> Any:
    """As Llama's and Gemma's: BOS is in the template, and added to every text besides."""
    from tokenizers import processors

    from laurel.models.loading.pretrained import train_tokenizer

    tokenizer = train_tokenizer(texts, vocab_size=SHAPE.vocabulary)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.convert_tokens_to_ids(BOS))],
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


def write_for_older_transformers(model: Path, copy: Path) -> None:
    """A copy that transformers 4.51 loads: its names of the tokenizer's class and of the base of
    the rotation, and no token types, which its tokenizers give and its decoders refuse."""
    shutil.copytree(model.resolve(), copy)
    changes = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "config.json": {"torch_dtype": "float32"},
    }
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    if "rope_parameters" in config:
        changes["config.json"]["rope_theta"] = config["rope_parameters"]["rope_theta"]
    for name, values in changes.items():
        written = json.loads((copy / name).read_text(encoding="utf-8"))
        (copy / name).write_text(json.dumps({**written, **values}), encoding="utf-8")


def measure(
    model: str,
    peer_model: Path,
    rows: Path,
    max_length: int,
    rounds: int,
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Both programs in turn over the same rows, and how their numbers compare."""
    programs = {
        "rewardbench": ("rewardbench_scoring.py", options.peer_python, str(peer_model)),
        "laurel": ("laurel_rewardbench.py", sys.executable, model),
    }
    settings = {"rows": str(rows), "max_length": max_length, "threads": options.threads}
    workers: list[Worker] = []
    try:
        for name, (script, python, directory) in programs.items():
            given = {
                **settings,
                "model": directory,
                "scratch_dir": str(folder),
                "scores": str(folder / f"{name}.json"),
            }
            workers.append(Worker.start(name, script, python, given, folder))
        for worker in workers:
            worker.facts = worker.listen(folder)
        run_rounds(workers, steps=1, rounds=dict.fromkeys(programs, rounds), log_dir=folder)
    finally:
        for worker in workers:
            worker.stop()
    theirs, ours = (json.loads((folder / f"{name}.json").read_text()) for name in programs)
    if theirs["ids"] != ours["ids"]:
        raise SystemExit("the two programs scored different rows")
    gaps = [
        abs(a - b)
        for key in ("chosen", "rejected")
        for a, b in zip(theirs[key], ours[key], strict=True)
    ]
    flips = sum(
        (a > b) != (c > d)
        for a, b, c, d in zip(
            theirs["chosen"], theirs["rejected"], ours["chosen"], ours["rejected"], strict=True
        )
    )
    return {
        "workers": {w.name: {"facts": w.facts, "repeats": w.repeats} for w in workers},
        "accuracies": {"rewardbench": theirs["accuracies"], "laurel": ours["accuracies"]},
        "num_rows": len(ours["ids"]),
        "deviation": statistics.pstdev([*ours["chosen"], *ours["rejected"]]),
        "largest_difference": max(gaps),
        "flips": flips,
        "agrees": max(gaps) <= TOLERANCE and theirs["accuracies"] == ours["accuracies"],
    }


def report(found: dict[str, Any], max_length: int, options: argparse.Namespace) -> str:
    theirs, ours = found["accuracies"].values()
    subsets = [
        [
            name,
            f"{theirs[name]:.4f}",
            f"{ours[name]:.4f}",
            "yes" if theirs[name] == ours[name] else "NO",
        ]
        for name in theirs
    ]
    facts = found["workers"]["laurel"]["facts"]
    told = facts["differences"]
    reasons = ", ".join(f"{reason} {one['num_rows']}" for reason, one in told["reasons"].items())
    lines = [
        f"\n{found['num_rows']:,} rows cut to {max_length:,} tokens; float32, {facts['threads']} "
        f"threads, {options.clock} time; {facts['sequence_tokens']:,} tokens of which "
        f"{facts['distinct_tokens']:,} distinct",
        f"tokens differ from the scoring contract's in {told['num_rows']:,} rows ({reasons}); the "
        f"model reads others in {told['num_rows_read_differently']:,}",
        "",
        table(["subset", "rewardbench", "laurel", "same"], subsets, as_markdown=options.markdown),
        "",
        f"largest difference of a score: {found['largest_difference']:.2e} (limit {TOLERANCE:.0e}; "
        f"scores have a deviation of {found['deviation']:.3f}); pairs decided otherwise: "
        f"{found['flips']}; agrees: {'yes' if found['agrees'] else 'NO'}",
    ]
    return "\n".join([*lines, *timing(found["workers"], options)])


def timing(workers: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Seconds of both; nothing where there was only a warm-up."""
    repeats = workers["rewardbench"]["repeats"]
    if not repeats:
        return []
    seconds = {
        name: [seconds_of(one, options.clock) for one in worker["repeats"]]
        for name, worker in workers.items()
    }
    slow = statistics.median(seconds["rewardbench"])
    rows = [
        [name, spread(values), f"{slow / statistics.median(values):.2f}"]
        for name, values in seconds.items()
    ]
    header = ["program", "seconds: median (range)", "times as fast"]
    whole = statistics.median(one["whole_seconds"] for one in repeats)
    return [
        "",
        table(header, rows, as_markdown=options.markdown),
        f"target: {TARGET:g} times as fast; rewardbench's script as a whole, formatting and "
        f"loading included, by the clock: {whole:.1f} s",
    ]


if __name__ == "__main__":
    main()

"""What do forests save on one GPU, and what share of its peak do scoring and training reach?

    python benchmarks/gpu.py --markdown

A reward model and a policy of 0.9G parameters in bfloat16 score and train the completions of a
step three ways: as token forests; as the same rows with a copy of the prompt for every completion;
and, for scoring, as padded batches through the model's own attention. The ways alternate, and
medians count. Shares of the peak count the operations that each way needs, not more.

`--profile` prints the kernels that take the most time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rounds import table, write_json

from laurel.data.forest import to_padded
from laurel.models.forest.attention import FOREST
from laurel.planning.request import TrainingRequest, Workload
from laurel.planning.step_time import forward_operations, training_operations
from laurel.run.trial.checks import SIZES, peak_of, with_vocabulary
from laurel.run.trial.phases import StepPhases

WORKLOADS = (
    Workload(num_prompts=8, per_prompt=8, prompt_tokens=512, completion_tokens=512),
    Workload(num_prompts=8, per_prompt=16, prompt_tokens=1024, completion_tokens=256),
    Workload(num_prompts=2, per_prompt=16, prompt_tokens=8192, completion_tokens=512),
)
QUICK = (Workload(num_prompts=2, per_prompt=4, prompt_tokens=32, completion_tokens=16),)


def main() -> None:
    options = read_options()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: --device cpu tries the program in small")
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if is_gpu else "the CPU, small sizes"
    precision = "bfloat16" if is_gpu else "float32"
    sizes = SIZES["cuda" if is_gpu else "cpu"]
    shape = sizes.large if is_gpu else sizes.small
    # The head's share of training grows with the vocabulary; a reward model has none.
    shapes = {
        "scoring": [shape],
        "training": [shape, with_vocabulary(shape, sizes.vocabulary)],
    }
    peak, whose = peak_of(device, precision)
    print(
        f"{shape.num_parameters / 1e9:.2g}G parameters, {precision}, {name}, torch "
        f"{torch.__version__}; {peak / 1e12:.3g} TFLOP/s {whose}"
    )
    rows: list[dict[str, Any]] = []
    for work in WORKLOADS if is_gpu else QUICK:
        for phase, shape in [(one, shape) for one in shapes for shape in shapes[one]]:
            ways = ways_of(phase, shape, work, device, precision)
            seconds = alternated(ways, options.repeats, device)
            for way, taken in seconds.items():
                counted = work if way == "forest" else alone(work)
                operations = forward_operations(shape, counted, has_logits=phase == "training")
                needed = operations.total
                if phase == "training":
                    needed = training_operations(operations, TrainingRequest(precision=precision))
                completions = work.num_prompts * work.per_prompt
                row = {
                    "phase": phase,
                    "vocabulary": shape.vocab_size,
                    "groups": f"{work.num_prompts} x {work.per_prompt}",
                    "tokens": f"{work.prompt_tokens} + {work.completion_tokens}",
                    "way": way,
                    "seconds": taken,
                    "completions_per_second": completions / taken,
                    "speedup_of_forest": taken / seconds["forest"],
                    "share_of_peak": needed / taken / peak,
                }
                # At once: what is measured is not lost if the machine's time ends.
                print(", ".join(f"{name} {cell(value)}" for name, value in row.items()), flush=True)
                rows.append(row)
            if options.profile:
                profile(ways["forest"], f"{phase} of {work}")
            del ways
            if is_gpu:
                torch.cuda.empty_cache()
    cells = [[cell(value) for value in row.values()] for row in rows]
    print(table(list(rows[0]), cells, as_markdown=options.markdown))
    write_json(options.json, {"device": name, "torch": torch.__version__, "rows": rows})


def cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def ways_of(
    phase: str, shape: Any, work: Workload, device: torch.device, precision: Any
) -> dict[str, Callable[[], Any]]:
    """Return one call for each way to do the phase; all work with models of the same weights."""
    forest = StepPhases(shape, work, device, precision)
    copies = StepPhases(shape, work, device, precision, shares_prompts=False)
    if phase == "training":
        copies.__dict__["policy"] = forest.policy
        copies.__dict__["learner"] = forest.learner
        return {"forest": forest.train, "copies": copies.train}
    copies.__dict__["reward_model"] = forest.reward_model
    model = forest.reward_model

    def padded() -> list[Any]:
        model.classifier.set_attn_implementation("sdpa")
        try:
            with model.without_gradients():
                return [
                    model(to_padded([group], pad_id=0)).cpu().numpy() for group in forest.groups
                ]
        finally:
            model.classifier.set_attn_implementation(FOREST)

    return {"forest": forest.score, "copies": copies.score, "padded": padded}


def alone(work: Workload) -> Workload:
    """Return the same completions, each with a prompt of its own."""
    return replace(work, num_prompts=work.num_prompts * work.per_prompt, per_prompt=1)


def alternated(
    ways: dict[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each way, after one call of each that is not timed."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, call in ways.items():
            wait(device)
            started = time.perf_counter()
            call()
            wait(device)
            if turn:
                times[way].append(time.perf_counter() - started)
    return {way: statistics.median(taken) for way, taken in times.items()}


def profile(call: Callable[[], Any], title: str) -> None:
    """Print the kernels of a call that take the most time, and the time that none was running."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    print(f"\n{title}")
    averages = seen.key_averages()
    print(averages.table(sort_by="self_device_time_total", row_limit=18, max_name_column_width=60))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: small sizes, as a trial")
    add("--repeats", type=int, default=5)
    add("--profile", action="store_true")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/gpu.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

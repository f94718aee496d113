"""Is the time that `laurel plan` predicts that of a real step? On one thread of this machine.

    python benchmarks/plan_time.py

In every round the machine's products and the bandwidth of its memory are measured, and a policy and
a reward model of 30M parameters (`--chat`: of the shape of SmolLM2-135M) do each phase of a step,
once with shared prompts and once with a copy for every completion. Processor time of one thread
counts, as the machine may be busy, and medians of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from material import CHAT_SHAPE, TINY_SHAPE, TRAINING_SHAPE, Shape
from rounds import machine, table, write_json

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.extensions.doctor.phases import StepPhases
from laurel.extensions.plan.step_time import Efficiency, StepTime, step_time
from laurel.models.forest.policy import prefers_onednn
from laurel.planning.memory import ModelShape, Shapes, decoder_shape
from laurel.planning.operations import Device, Workload
from laurel.planning.plan import plan_run
from laurel.run.request import request_of

WORKLOADS = (
    Workload(num_prompts=2, per_prompt=8, prompt_tokens=256, completion_tokens=128),
    Workload(num_prompts=4, per_prompt=4, prompt_tokens=64, completion_tokens=128),
)
TARGET = 0.25
"""Largest difference of a predicted time of a step from the measured one, as a part of it."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    measures = TINY_SHAPE if options.quick else CHAT_SHAPE if options.chat else TRAINING_SHAPE
    workloads = WORKLOADS[1:] if options.chat else WORKLOADS
    results = [measure(measures, work, options) for work in workloads]
    rows = [row for result in results for row in result["rows"]]
    shape = model_shape(measures, has_language_head=True)
    print(
        f"{shape.num_parameters / 1e6:.1f}M parameters, float32, one thread, "
        f"{options.efficiency:.0%} of the measured peak\n"
    )
    cells = [
        [
            row["workload"],
            row["phase"],
            *(f"{row[key]:.2f}" for key in ("predicted", "measured")),
            f"{row['predicted'] / row['measured']:.2f}",
        ]
        for row in rows
    ]
    header = ["prompts x completions, tokens", "phase", "predicted, CPU s", "measured", "ratio"]
    print(table(header, cells, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "results": results})
    steps = [row for row in rows if row["phase"].startswith("step")]
    holds = all(abs(row["predicted"] / row["measured"] - 1) <= TARGET for row in steps)
    sys.exit(0 if holds or options.quick else 1)


def measure(measures: Shape, work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Every phase of a step, in turn with the rates of the machine; as planned and padded."""
    shape, head = (model_shape(measures, has_language_head=has) for has in (True, False))
    shared, padded = (
        StepPhases(shape, work, torch.device("cpu"), "float32", shares_prompts=shares)
        for shares in (True, False)
    )
    runs: dict[str, Callable[[], Any]] = {
        "generation": shared.generate,
        "scoring": shared.score,
        "log-probs": shared.logprobs,
        "training": shared.train,
        "scoring, padded": padded.score,
        "log-probs, padded": padded.logprobs,
        "training, padded": padded.train,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    rates: dict[str, list[float]] = {"rows of a forest": [], "rows under way": [], "bandwidth": []}
    for number in range(options.rounds + 1):
        print(f"  {named(work)}: round {number}", file=sys.stderr)
        rates["rows of a forest"].append(product_rate(measures, work.tokens // work.num_prompts))
        under_way = work.num_prompts * work.per_prompt
        rates["rows under way"].append(product_rate(measures, under_way))
        rates["bandwidth"].append(bandwidth())
        for name, run in runs.items():
            started = time.process_time()
            run()
            if number:  # the first round makes the models and warms up
                taken[name].append(time.process_time() - started)
    shared.close()
    shapes = Shapes(policy=shape, reward_models=(head,))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    predicted: dict[str, float] = {}
    for rows in ("rows of a forest", "rows under way"):
        found = prediction(
            shapes,
            work,
            Device(
                name="this machine",
                flops={"float32": statistics.median(rates[rows])},
                bandwidth=statistics.median(rates["bandwidth"]),
                memory=0,
                link=1.0,
                network=1.0,
                source="measured",
            ),
            Efficiency(products=options.efficiency, memory=1.0),
        )
        for phase in found.phases:
            # Generation multiplies as many rows as completions are under way, all else whole
            # forests, and few rows are slower on a CPU.
            if (phase.name == "generation") == (rows == "rows under way"):
                predicted[phase.name] = phase.shared.seconds
                predicted[f"{phase.name}, padded"] = phase.padded.seconds
    rows_of = [
        {
            "workload": named(work),
            "phase": name,
            "predicted": predicted[name],
            "measured": seconds,
        }
        for name, seconds in medians.items()
    ]
    whole = {
        "workload": named(work),
        "phase": "step",
        "predicted": sum(row["predicted"] for row in rows_of if "padded" not in row["phase"]),
        "measured": sum(row["measured"] for row in rows_of if "padded" not in row["phase"]),
    }
    return {"rates": rates, "taken": taken, "rows": [*rows_of, whole]}


def named(work: Workload) -> str:
    return (
        f"{work.num_prompts} of {work.prompt_tokens} x {work.per_prompt} of "
        f"{work.completion_tokens}"
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.75,
        help="part of the products' peak: norms, activations and the optimizer take the rest",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the second workload with the shape of SmolLM2-135M"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--markdown", action="store_true", help="a table for docs/parallelism.md")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/plan_time.json"))
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def model_shape(shape: Shape, *, has_language_head: bool) -> ModelShape:
    return decoder_shape(
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        intermediate_size=shape.feed_forward,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        has_language_head=has_language_head,
    )


def product_rate(shape: Shape, tokens: int) -> float:
    """Operations a second of the products of many feed-forward layers with so many rows."""
    left = torch.randn(tokens, shape.hidden)
    layers = [torch.randn(shape.feed_forward, shape.hidden) for _ in range(3 * shape.layers)]
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    ways: list[Callable[[], Any]] = [lambda: [left @ weight.T for weight in layers]]
    if linear is not None and prefers_onednn():
        ways.append(lambda: [linear(left, weight, None, "none", [], "") for weight in layers])
    best = min(cpu_seconds(way) for way in ways)
    return 2 * len(layers) * tokens * shape.hidden * shape.feed_forward / best


def bandwidth(size: int = 2**28) -> float:
    """Bytes a second of a sum over more numbers than any cache holds."""
    numbers = torch.ones(size // 4)
    return size / cpu_seconds(numbers.sum)


def cpu_seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def prediction(
    shapes: Shapes,
    work: Workload,
    device: Device,
    efficiency: Efficiency,
    *,
    precision: str = "float32",
    kind: str = "cpu",
    compiles: str = "auto",
) -> StepTime:
    """What the planner says of such a run on a device, a micro-batch for each prompt."""
    longest = work.prompt_tokens + work.completion_tokens
    budget = work.tokens // work.num_prompts
    changes = [
        f"cluster.device={kind}",
        f"policy.compile={compiles}",
        "cluster.gpus_per_node=1",
        f"policy.precision={precision}",
        f"policy.max_total_sequence_length={longest}",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={budget}",
        f"policy.train_global_batch_size={work.num_prompts * work.per_prompt}",
        f"grpo.num_prompts_per_step={work.num_prompts}",
        f"grpo.num_generations_per_prompt={work.per_prompt}",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "env.reward_model.enabled=true",
        "env.reward_model.model_name=judge",
        f"env.reward_model.precision={precision}",
        f"env.reward_model.compile={compiles}",
        f"env.reward_model.batch_tokens={budget}",
    ]
    request = request_of(load_config(GRPORun, None, changes).config)
    return step_time(
        request,
        plan_run(request),
        shapes,
        workload=work,
        device=device,
        efficiency=efficiency,
    )


if __name__ == "__main__":
    main()

"""How long does planning take, from 1 to 1,024 nodes? A run that fits and one that does not.

python benchmarks/planning_time.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.extensions.plan.fit import FittedPlan, fit
from laurel.extensions.plan.plan import plan_text
from laurel.planning.memory import Shapes, parse_shape
from laurel.run.model import ReadShapes
from laurel.run.request import request_of

TARGET_SECONDS = 1.0
REPEATS = 5
MEMORY = 80 * 2**30
LLAMA_70B = (
    "hidden_size=8192,num_layers=80,intermediate_size=28672,num_heads=64,num_kv_heads=8,"
    "vocab_size=128256"
)
SHAPES = Shapes(
    policy=parse_shape(LLAMA_70B, has_language_head=True),
    reward_models=(parse_shape(LLAMA_70B, has_language_head=False),),
)


def configuration(num_nodes: int, *, fits: bool) -> GRPORun:
    """A 70B policy and a 70B judge; where it shall not fit, activations are kept, at length."""
    parallel, judge = "policy.dtensor_cfg", "env.reward_model"
    judging_nodes = num_nodes // 4
    data_parallel = num_nodes - judging_nodes
    changes = [
        f"cluster.num_nodes={num_nodes}",
        "cluster.gpus_per_node=8",
        f"{parallel}.tensor_parallel_size=8",
        f"{parallel}.activation_checkpointing={fits}",
        f"policy.max_total_sequence_length={2048 if fits else 16384}",
        f"policy.train_global_batch_size={16 * data_parallel}",
        f"grpo.num_prompts_per_step={data_parallel}",
        "policy.generation.vllm_cfg.tensor_parallel_size=8",
        f"{judge}.enabled=true",
        f"{judge}.model_name=judge",
        f"{judge}.dtensor_cfg.tensor_parallel_size=8",
        f"{judge}.precision=bfloat16",
    ]
    if judging_nodes:
        changes += [f"{judge}.resources.gpus_per_node=8"]
        changes += [f"{judge}.resources.num_nodes={judging_nodes}"]
    return load_config(GRPORun, None, changes).config


def measure(config: GRPORun) -> tuple[float, FittedPlan]:
    """Median seconds to plan and to write the page."""
    seconds, read = [], ReadShapes(shapes=SHAPES, unknown={})
    for _ in range(REPEATS):
        started = time.perf_counter()
        request = request_of(config)
        fitted = fit(request, SHAPES, device_memory=MEMORY)
        plan_text(request, fitted, read, device_memory=MEMORY)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), fitted


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(f"target {TARGET_SECONDS} s; load {os.getloadavg()[0]:.1f}")
    print("nodes  slots   run         fits   seconds  conflicts")
    for num_nodes in (1, 2, 4, 16, 64, 256, 1024):
        for fits in (True, False):
            seconds, fitted = measure(configuration(num_nodes, fits=fits))
            kind = "recomputed" if fits else "kept, long"
            print(
                f"{num_nodes:5}  {8 * num_nodes:5}   {kind:10}  {fitted.fits!s:5}  {seconds:7.3f}  "
                f"{len(fitted.conflicts)}"
            )


if __name__ == "__main__":
    main()

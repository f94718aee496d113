"""Is a spread model the same model, and how much of it does each rank hold?

    python benchmarks/parallelism.py

A Qwen3 reward model with random weights takes one step on groups of random tokens, in one process
and over data-parallel (dp), tensor-parallel (tp) and context-parallel (cp) ranks that are processes
of a Ray cluster on this machine. Gradients are read off the weights: plain gradient descent with
step 1 subtracts them. Memory is the peak of what a rank holds (not of files it maps) above that
when torch is loaded.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from material import SCORING_SHAPE, TINY_SHAPE, TRAINING_SHAPE, Shape, save_model
from rounds import machine, table, write_json

from laurel.config.policy import ClusterConfig, DTensorConfig, NamedCall, PolicyConfig
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.spec import ParallelShape
from laurel.run.model import model_spec
from laurel.training.learner_group import LearnerGroup, LearnerWorker, ModelFacts
from laurel.training.losses import RewardLoss
from laurel.types import Completion, Group, Message, Preference, TokenGroup
from laurel.workers.ray_cluster import RayCluster, Reservation
from laurel.workers.ray_group import RayGroup
from laurel.workers.rendezvous import RankPlace
from laurel.workers.reservations import Resources

MESHES = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4))
"""dp, tp, cp."""
GROUPS, PROMPT, ANSWER = 8, 48, 40
MIB = 2**20
WATCH_SECONDS = 0.005


class Measured(LearnerWorker):
    """A rank that knows how much memory it took."""

    def __init__(self, place: RankPlace, *args: Any, **kwargs: Any) -> None:
        torch.zeros(1).add_(1)
        self._before = self._peak = own_bytes()
        threading.Thread(target=self._watch, daemon=True).start()
        super().__init__(place, *args, **kwargs)
        self._loaded = self._peak

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, own_bytes())
            time.sleep(WATCH_SECONDS)

    def peak_bytes(self) -> tuple[int, int]:
        """Most that it held at a time, loading and altogether, less what was before the model."""
        return self._loaded - self._before, self._peak - self._before


def own_bytes() -> int:
    """Memory of this process, without files that it has mapped: the system takes those back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this benchmark reads RssAnon of /proc/self/status, which only Linux has")


def main() -> None:
    options = read_options()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    shape = SCORING_SHAPE if options.large else shape
    rows = []
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as directory:
        save_model(Path(directory), shape, ["a text to learn a tokenizer from, word for word"])
        with RayCluster(cpus=max(map(math.prod, options.meshes)), gpus=0) as cluster:
            for dp, tp, cp in options.meshes:
                print(f"  dp {dp}, tp {tp}, cp {cp}", file=sys.stderr)
                spread = ParallelShape(dp_shard=dp, tp=tp, cp=cp)
                rows.append(measure(cluster, Path(directory), shape, spread))
    print(report(rows, as_markdown=options.markdown))
    for row in rows:
        row.pop("gradients")
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run")
    parser.add_argument(
        "--large", action="store_true", help="seven layers of Qwen3-0.6B, to see memory fall"
    )
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=["x".join(map(str, mesh)) for mesh in MESHES],
        help="dp x tp x cp of each",
    )
    parser.add_argument("--markdown", action="store_true", help="a table for docs/parallelism.md")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/parallelism.json"))
    options = parser.parse_args()
    options.meshes = [tuple(map(int, mesh.split("x"))) for mesh in options.meshes]
    return options


def measure(
    cluster: RayCluster, directory: Path, shape: Shape, spread: ParallelShape
) -> dict[str, Any]:
    """One step, twice: of gradient descent for the gradients, of AdamW for the memory."""
    descent = NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0})
    slots = cluster.reserve("policy", spread.num_ranks, Resources(cpus=1))
    learner = started(slots, directory, descent, spread)
    facts: ModelFacts = learner.facts
    batch = Batcher("forest", policy_of(directory, descent, spread).batch_limits, pad_id=0).cut(
        *material(shape)
    )
    loss = RewardLoss(LossConfig())
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    update = learner.update(batch, loss)
    gradients = {name: before[name] - weight for name, weight in learner.named_weights()}
    learner.shutdown()
    learner = started(slots, directory, PolicyConfig().optimizer, spread)
    learner.update(batch, loss)
    held = max(learner.held_bytes())
    loading, peak = (max(peaks) for peaks in zip(*learner.group.call("peak_bytes"), strict=True))
    learner.shutdown()
    slots.release()
    return {
        "dp": spread.dp_shard,
        "tp": spread.tp,
        "cp": spread.cp,
        "loss": update.metrics["loss"],
        "gradients": gradients,
        "parameters": facts.num_parameters,
        "held": held,
        "loading": loading,
        "peak": peak,
    }


def started(
    slots: Reservation, directory: Path, optimizer: NamedCall, spread: ParallelShape
) -> LearnerGroup:
    policy = policy_of(directory, optimizer, spread)
    load = partial(
        load_reward_model, model_spec(policy), seed=1, max_length=512, truncation_side="left"
    )
    group = RayGroup(
        slots,
        Measured,
        load,
        shape=spread,
        optimizer=policy.optimizer,
        scheduler=policy.scheduler,
        max_grad_norm=policy.max_grad_norm,
        cluster=ClusterConfig(device="cpu", cpu_threads=1),
        seed=1,
    )
    return LearnerGroup(group, spread)


def policy_of(directory: Path, optimizer: NamedCall, spread: ParallelShape) -> PolicyConfig:
    return PolicyConfig(
        model_name=str(directory),
        precision="float32",
        max_total_sequence_length=256,
        max_grad_norm=None,
        optimizer=optimizer,
        dtensor_cfg=DTensorConfig(tensor_parallel_size=spread.tp, context_parallel_size=spread.cp),
    )


def material(shape: Shape) -> tuple[list[TokenGroup], list[Preference]]:
    """Pairs of random answers to random prompts."""
    drawn = np.random.default_rng(0)
    groups, preferences = [], []
    for number in range(GROUPS):
        ids = drawn.integers(1, shape.vocabulary, size=(PROMPT + 2 * ANSWER,)).astype(np.int32)
        answers = (ids[PROMPT : PROMPT + ANSWER], ids[PROMPT + ANSWER :])
        groups.append(TokenGroup(id=str(number), trunk_ids=ids[:PROMPT], branches_ids_G=answers))
        said = tuple(Completion(messages=(Message("assistant", text),)) for text in "ab")
        group = Group(id=str(number), prompt=(Message("user", "?"),), completions_G=said)
        preferences.append(Preference(group=group, ranks_G=(0, 1), source=str(number)))
    return groups, preferences


def report(rows: list[dict[str, Any]], *, as_markdown: bool) -> str:
    one = rows[0]
    size = norm(one["gradients"].values())
    lines = []
    for row in rows:
        difference = norm(
            row["gradients"][name] - one["gradients"][name] for name in one["gradients"]
        )
        ranks = row["dp"] * row["tp"] * row["cp"]
        whole = 16 * row["parameters"] / MIB
        lines.append(
            [
                str(row["dp"]),
                str(row["tp"]),
                str(row["cp"]),
                f"{abs(row['loss'] / one['loss'] - 1):.1e}",
                f"{difference / size:.1e}",
                f"{row['held'] / MIB:.1f}",
                f"{row['loading'] / MIB:.0f}",
                f"{row['peak'] / MIB:.0f}",
                f"{(row['peak'] / MIB) - whole / ranks:.0f}",
            ]
        )
    header = [
        "dp",
        "tp",
        "cp",
        "loss, relative difference",
        "gradient, relative difference",
        "weights held by a rank, MiB",
        "peak while loading",
        "peak of a rank, MiB",
        "peak less 16 bytes x P / ranks",
    ]
    first = f"P = {one['parameters'] / 1e6:.1f}M parameters: 16 bytes each are {whole:.0f} MiB"
    return f"{first}\n\n{table(header, lines, as_markdown=as_markdown)}"


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


if __name__ == "__main__":
    main()

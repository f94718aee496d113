"""How soon do weights reach generators in other processes, on each of the ways there are?

    python benchmarks/weight_transfer.py

A Qwen3 policy with random weights gives all of them to replicas of its engine, every role a process
of a Ray cluster on this machine. Each way has replicas of its own; they get weights in turn, and
the first round is not counted. Then every replica must hold the learner's weights, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from material import SCORING_SHAPE, TINY_SHAPE, TRAINING_SHAPE, Shape, save_policy
from rounds import machine, spread, table, write_json

from laurel.config.grpo import GRPOPolicyConfig
from laurel.config.policy import ClusterConfig
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.load import GeneratorSpec, TransformersMaker
from laurel.generation.replicas import GeneratorReplicas
from laurel.generation.weights.routes import WeightTransfer
from laurel.models.loading.policy import load_policy
from laurel.models.loading.pretrained import train_tokenizer
from laurel.models.spec import ParallelShape
from laurel.run.model import model_spec
from laurel.training.learner_group import LearnerGroup, LearnerWorker
from laurel.workers.ray_cluster import RayCluster
from laurel.workers.ray_group import RayGroup
from laurel.workers.reservations import Resources

WAYS = {"object_store": "Ray's object store", "broadcast": "broadcast (gloo)"}
SIZES = {"tiny": TINY_SHAPE, "25M": TRAINING_SHAPE, "110M": SCORING_SHAPE}
MAX_LENGTH = 64
CPU = ClusterConfig(device="cpu", cpu_threads=1)


class Shifting(LearnerWorker):
    """Has other weights than those that the engines begin with."""

    def shift(self) -> None:
        with torch.no_grad():
            for parameter in self.learner.model.parameters():
                parameter.add_(0.01)


class Holding(EngineWorker):
    """Can say what its engine holds."""

    def digest(self) -> str:
        engine: Any = self._engine
        return digest_of(engine._held.model.named_weights())


def digest_of(weights: Any) -> str:
    """Of all names and bits."""
    found = hashlib.sha256()
    for name, tensor in weights:
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    options = read_options()
    shapes = {size: SIZES[size] for size in options.sizes}
    rows = []
    slots = max(options.dp) + len(WAYS) * max(options.replicas)
    with RayCluster(cpus=slots, gpus=0) as cluster:
        for name, shape in shapes.items():
            for dp in options.dp:
                for replicas in options.replicas:
                    print(f"  {name}, dp {dp}, {replicas} replicas", file=sys.stderr)
                    rows.append(measure(cluster, shape, options, dp=dp, replicas=replicas))
    print(report(rows, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="measured transfers of each way")
    add("--sizes", nargs="+", choices=SIZES, default=["25M", "110M"], help="models")
    add("--replicas", type=int, nargs="+", default=[2])
    add("--dp", type=int, nargs="+", default=[1, 2], help="ranks that the learner is spread over")
    add("--bucket-mib", type=int, help="of all ways, instead of what each has by default")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add("--markdown", action="store_true", help="a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/weight_transfer.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.dp, options.sizes = 1, [1], ["tiny"]
    return options


def measure(
    cluster: RayCluster, shape: Shape, options: argparse.Namespace, *, dp: int, replicas: int
) -> dict[str, Any]:
    """All ways in turn, with one learner."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="laurel-benchmark-"))
        texts = ["a text to learn a tokenizer from, word for word"]
        save_policy(Path(directory), shape, train_tokenizer(texts, vocab_size=shape.vocabulary))
        policy = GRPOPolicyConfig(
            model_name=directory, precision="float32", max_total_sequence_length=MAX_LENGTH
        )
        learner = started(cluster, policy, dp, stack)
        generators = {}
        for way in WAYS:
            generators[way] = generator_of(cluster, policy, way, replicas, options, stack)
        for version in range(1, options.rounds + 2):
            for way, (generator, _) in generators.items():
                began = time.perf_counter()
                asyncio.run(generator.update_weights(learner.weights(version)))
                seconds[way].append(time.perf_counter() - began)
        expected = digest_of(learner.named_weights())
        for way, (generator, groups) in generators.items():
            digests = {group.call_one(0, "digest") for group in groups.values()}
            if digests != {expected} or generator.num_weight_fallbacks:
                raise SystemExit(f"{way}: the replicas do not hold the learner's weights")
        parameters = learner.facts.num_parameters
    measured = {way: values[1:] for way, values in seconds.items()}
    return {"parameters": parameters, "dp": dp, "replicas": replicas, "seconds": measured}


def started(
    cluster: RayCluster, policy: GRPOPolicyConfig, dp: int, stack: ExitStack
) -> LearnerGroup:
    slots = cluster.reserve("policy", dp, Resources(cpus=1))
    stack.callback(slots.release)
    shape = ParallelShape(dp_shard=dp)
    group = RayGroup(
        slots,
        Shifting,
        partial(load_policy, model_spec(policy), seed=1, max_length=MAX_LENGTH),
        shape=shape,
        optimizer=policy.optimizer,
        scheduler=policy.scheduler,
        max_grad_norm=policy.max_grad_norm,
        cluster=CPU,
        seed=1,
    )
    stack.callback(group.shutdown)
    group.call("shift")
    return LearnerGroup(group, shape)


def generator_of(
    cluster: RayCluster,
    policy: GRPOPolicyConfig,
    way: Any,
    count: int,
    options: argparse.Namespace,
    stack: ExitStack,
) -> tuple[GeneratorReplicas, dict[int, RayGroup]]:
    slots = cluster.reserve("generation", count, Resources(cpus=1))
    stack.callback(slots.release)
    maker = TransformersMaker(
        model=model_spec(policy),
        device="cpu",
        cpu_threads=1,
        spec=GeneratorSpec(seed=1, end_ids=(0,), max_length=MAX_LENGTH),
    )
    groups: dict[int, RayGroup] = {}

    def make(index: int) -> RayGroup:
        groups[index] = RayGroup(slots.part("generation", [index]), Holding, maker)
        return groups[index]

    generator = GeneratorReplicas(
        make,
        count,
        transfer=WeightTransfer(
            name=way, bucket_bytes=options.bucket_mib and options.bucket_mib << 20
        ),
    )
    stack.callback(generator.close)
    return generator, groups


def report(rows: list[dict[str, Any]], *, as_markdown: bool) -> str:
    lines = []
    first, *others = WAYS
    for row in rows:
        seconds = row["seconds"]
        ratios = [
            statistics.median(a / b for a, b in zip(seconds[first], seconds[way], strict=True))
            for way in others
        ]
        lines.append(
            [
                f"{row['parameters'] / 1e6:.1f}M",
                str(row["dp"]),
                str(row["replicas"]),
                *(spread(seconds[way]) for way in WAYS),
                *(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    names = [f"times as quick: {WAYS[way]}" for way in others]
    header = ["parameters", "dp of the learner", "replicas", *WAYS.values(), *names]
    return table(header, lines, as_markdown=as_markdown)


if __name__ == "__main__":
    main()

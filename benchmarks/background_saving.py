"""How long does training stand still for a checkpoint, in front of the loop and behind it?

    python benchmarks/background_saving.py

A policy of about 100M parameters with AdamW, saved whole (weights, optimizer, hashes, fsync) as
runs save it. The two ways take turns; behind the loop, training steps go on until the checkpoint is
whole, and are compared with steps that nothing is written beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from material import SCORING_SHAPE, TINY_SHAPE, Shape, save_policy
from rounds import machine, spread, table, write_json
from torch import Tensor

from laurel.config.grpo import GRPOPolicyConfig
from laurel.data.forest import MicroBatch, to_forest
from laurel.models.checkpoint.card import CardFacts
from laurel.models.checkpoint.store import CheckpointStore
from laurel.models.loading.policy import load_policy
from laurel.models.loading.pretrained import train_tokenizer
from laurel.run.model import model_spec
from laurel.training.learner import LocalLearner
from laurel.training.losses import LossOutput
from laurel.training.state import CheckpointParts, PolicyRunState
from laurel.training.stopping import Position
from laurel.types import TokenGroup
from laurel.workers.process import choose_device

WAYS = {"front": "in front of the loop", "behind": "in the background"}
WARM_UP_STEPS = 3


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-", dir=options.directory) as place:
        run = Run(Path(place), TINY_SHAPE if options.quick else SCORING_SHAPE, options)
        results = run.measure(options.rounds)
    print(report(results, run.num_parameters, options), flush=True)
    write_json(options.json, {"machine": machine(), "options": vars(options), "results": results})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="saves of each way")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--threads", type=int, default=2)
    add("--tokens", type=int, default=256, help="of each of the two completions of a step")
    add("--directory", type=Path, help="on the disk that is to be measured; default: of the system")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/background_saving.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


class Likelihood:
    """A loss that makes what it is shown more likely."""

    def count(self, batch: Sequence[None]) -> float:
        return 1.0

    def __call__(self, outputs: Any, batch: Sequence[None], *, num_groups: float) -> LossOutput:
        loss: Tensor = -outputs.logprobs_M.mean() / num_groups
        return LossOutput(loss=loss, sums={})

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        return {}


class Run:
    """A learner, and the checkpoints of its run."""

    def __init__(self, place: Path, shape: Shape, options: argparse.Namespace) -> None:
        self.place = place
        self.device = choose_device(options.device)
        tokenizer = train_tokenizer(["laurel"], vocab_size=300)
        save_policy(place / "model", shape, tokenizer)
        policy = GRPOPolicyConfig(model_name=str(place / "model"), precision="float32")
        loaded = load_policy(model_spec(policy), seed=0, max_length=4096, device=self.device)
        self.num_parameters = sum(p.numel() for p in loaded.model.parameters())
        self.learner = LocalLearner(
            loaded.model, optimizer=policy.optimizer, tokenizer=loaded.tokenizer
        )
        card = CardFacts()
        self.state = PolicyRunState(
            self.learner, CheckpointParts(card=card, run_dir=place), rows={}
        )
        drawn = np.random.default_rng(0).integers(3, shape.vocabulary, (3, options.tokens))
        trunk, *branches = drawn.astype(np.int32)
        group = TokenGroup(id="0", trunk_ids=trunk, branches_ids_G=tuple(branches))
        self.batch = [
            MicroBatch(inputs=to_forest([group]), labels=[None], num_tokens=3 * options.tokens)
        ]

    def step(self) -> float:
        """Seconds of a training step."""
        started = time.perf_counter()
        update = self.learner.update(self.batch, Likelihood())
        assert update.failure is None, update.failure
        return time.perf_counter() - started

    def measure(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Saves of both ways in turn, the first of each not counted."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        found: dict[str, dict[str, list[float]]] = {
            way: {"still": [], "whole": [], "alone": [], "beside": []} for way in WAYS
        }
        with CheckpointStore(self.place / "saves", keep_top_k=1) as store:
            for number in range(2 * (rounds + 1)):
                way = list(WAYS)[number % 2]
                result = self.save(store, number, way)
                print(f"  {number // 2} {way:8} {result}", file=sys.stderr)
                if number >= len(WAYS):
                    for name, values in result.items():
                        found[way][name] += values
        return found

    def save(self, store: CheckpointStore, number: int, way: str) -> dict[str, list[float]]:
        """One save: seconds that the loop stood still, until it was whole, and of steps."""
        alone = [self.step()]
        started = time.perf_counter()
        write = partial(
            self.state.write, position=Position(step=number), in_background=way == "behind"
        )
        save = store.begin(number, write)
        if way == "front":
            save.finish()
        still = time.perf_counter() - started
        beside = []
        while not save.ready():
            beside.append(self.step())
        save.finish()
        return {"still": [still], "whole": [save.seconds], "alone": alone, "beside": beside}


def report(
    results: Mapping[str, Mapping[str, Sequence[float]]],
    num_parameters: int,
    options: argparse.Namespace,
) -> str:
    rows = []
    for way, label in WAYS.items():
        found = results[way]
        beside = f"{statistics.median(found['beside']):.2f}" if found["beside"] else "-"
        rows.append([label, spread(found["still"]), spread(found["whole"]), beside])
    alone = [seconds for found in results.values() for seconds in found["alone"]]
    front, behind = (statistics.median(results[way]["still"]) for way in WAYS)
    header = [
        "saved",
        "seconds the loop stands still: median (range)",
        "seconds of work until it is whole",
        "seconds of a step beside it",
    ]
    return (
        table(header, rows, as_markdown=options.markdown)
        + f"\n\n{num_parameters / 1e6:.1f}M parameters with AdamW; a step with nothing beside it: "
        + f"{statistics.median(alone):.2f} s; stands still {front / behind:.1f} times as long in "
        + "front"
    )


if __name__ == "__main__":
    main()

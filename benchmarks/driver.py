"""What does the driver of a GRPO step cost, by completions and by ranks of the learner?

    python benchmarks/driver.py

The loop's own step (`GRPO.take_step`) with rollouts of 4,096 tokens, the default loss (reference
log-probabilities, so that two calls go to the learner) and all its metrics; with `--write` also
the file of the completions (`logger.write_completions`), most of which is its compression.

There is no model: completions are slices of random arrays, an environment gives random rewards,
and the workers of the learner take what they are given as it would travel (copied, as the driver
copies it into an object store), and answer at once: their log-probabilities are views of one array
that is there before, so neither making nor receiving them is measured.

Seconds are processor time (`time.process_time`), because other processes share the machine. Objects
from before the step are out of the garbage collector's sight, as they are in a run. Memory
is the largest resident set of the process, which is another one for each row, above that with
everything imported and before the first completion. What a cluster's object store holds is not in
it; its bytes are counted as `sent`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from rounds import machine, table, write_json

from laurel.config.grpo import GRPOConfig, PolicyLossConfig
from laurel.config.policy import BatchLimits, RolloutLoggerConfig
from laurel.data.forest import Batcher
from laurel.environments.interface import EnvironmentInterface
from laurel.grpo.loop import GRPO, GRPOSettings, PolicyParts
from laurel.grpo.rollouts import RolloutLimits, Rollouts
from laurel.grpo.source import RolloutSource
from laurel.models.chat import ChatFormat
from laurel.models.forest.outputs import TokenOutputs
from laurel.models.spec import ParallelShape
from laurel.observe.health import Alarms
from laurel.protocols import Generator
from laurel.training.learner import StepReport
from laurel.training.learner_group import LearnerGroup
from laurel.training.loop import long_lived_objects
from laurel.training.stopping import Position
from laurel.types import (
    EnvironmentReturn,
    Generated,
    GenerationRequest,
    Message,
    SamplingParams,
    Task,
    Weights,
)
from laurel.workers.calls import GroupCalls, WorkerCall
from laurel.workers.ray_group import sent_once
from laurel.workers.worker_actor import Packed

TARGET_SECONDS, TARGET_GB, TARGET_COMPLETIONS = 3.0, 8.0, 16_384
COMPLETIONS = (1_024, 4_096, 16_384, 65_536)
MESHES = ((8, 1, 1), (8, 2, 1), (8, 8, 1), (8, 8, 4), (64, 1, 1), (1_024, 1, 1), (64, 8, 2))
"""dp, tp, cp."""
PROMPT, LENGTH, GROUP = 256, 4_096, 16
FOREST_TOKENS = 8 * LENGTH
VOCABULARY = 50_000


class Answers:
    """A generator that has all completions before it is asked."""

    def __init__(self, num_groups: int) -> None:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, VOCABULARY, (num_groups * GROUP, LENGTH), dtype=np.int32)
        self._ids = iter(ids)
        self._logprobs = iter(-rng.random(ids.shape, dtype=np.float32))
        self._texts = iter([" ".join(map(str, row)) for row in ids // 100])

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        for index in range(len(request.seeds_G)):
            yield Generated(
                index=index,
                ids_L=next(self._ids),
                logprobs_L=next(self._logprobs),
                text=next(self._texts),
                finish_reason="stop",
                weight_version=0,
            )

    async def update_weights(self, weights: Weights) -> None: ...


class Chance(EnvironmentInterface):
    """Rewards at random."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "user", "content": ""}] * size,
            metadata=[None] * size,
            next_stop_strings=[None] * size,
            rewards=torch.rand(size),
            terminateds=torch.ones(size, dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}


class Prompts:
    """Prompts of one length."""

    def prompt_ids(self, conversation: Any, /, tools: Any = ()) -> Any:
        return np.arange(PROMPT, dtype=np.int32)

    def control_token_in(self, _text: str) -> None:
        return None

    def observation_ids(self, observation: Any, /, *, history: Any, turn_ids: Any) -> Any:
        raise AssertionError("conversations have one turn")


class StubGroup(GroupCalls):
    """Workers that are sent what real ones would be, and answer without a model."""

    def __init__(self, size: int, each: int) -> None:
        self.role, self.size = "policy", size
        self.num_sent = self.sent_bytes = 0
        self._each = each
        self._store = np.ones(2**20, np.uint8)
        self._logprobs = torch.full((FOREST_TOKENS,), -1.0)

    def _send(self, payload: Packed) -> int:
        """Copy it, as into an object store, whose memory is there before."""
        self.num_sent += 1
        for part in (np.frombuffer(payload.head, np.uint8), *payload.buffers):
            self.sent_bytes += part.nbytes
            for start in range(0, part.nbytes, len(self._store)):
                piece = part[start : start + len(self._store)]
                self._store[: len(piece)] = piece
        return self.num_sent

    def _submit(self, calls: Mapping[int, WorkerCall]) -> Any:
        sent_once(calls, self._send)
        results = [self._answer(rank, call) for rank, call in calls.items()]
        return SimpleNamespace(wait=lambda timeout=None: results, done=lambda: True)

    def _answer(self, rank: int, call: WorkerCall) -> Any:
        if call.method == "describe":
            return SimpleNamespace(num_trained=1, num_parameters=1)
        if call.method == "learning_rate":
            return 1e-6
        speaks = rank % self._each == 0
        if call.method == "outputs":
            inputs = call.args[0] if speaks else ()
            sizes = [sum(b.length for t in f.trees for b in t.nodes[1:]) for f in inputs]
            return [TokenOutputs(self._logprobs[:size], None) for size in sizes]
        assert call.method == "take_step"
        sums = dict.fromkeys(("global_valid_toks", "global_valid_seqs"), torch.ones(()))
        report = StepReport(sums=sums, learning_rate=1e-6, grad_norm=1.0)
        return (report if speaks else None), 1e-6

    def alive(self) -> list[bool]:
        return [True] * self.size

    def shutdown(self) -> None: ...


class Silent:
    """Stands for what shows and logs."""

    done = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    @contextlib.contextmanager
    def phase(self, *args: Any, **kwargs: Any) -> Iterator[Silent]:
        yield self


def loop_of(
    num_groups: int, group: StubGroup, shape: ParallelShape, run_dir: Path, *, writes: bool
) -> GRPO:
    """The loop of a run, with everything that is no driver replaced."""
    config = GRPOConfig(num_prompts_per_step=num_groups, num_generations_per_prompt=GROUP)
    environment, generator = Chance(), cast(Generator, Answers(num_groups))
    prompts = cast(ChatFormat, Prompts())
    rollouts = Rollouts(
        generator,
        {"chance": environment},
        prompts,
        RolloutLimits(max_turns=1, max_length=PROMPT + LENGTH),
        seed=0,
    )
    tasks = [
        Task(id=str(i), prompt=(Message("user", "word " * PROMPT),), environment="chance")
        for i in range(num_groups)
    ]
    sampling = SamplingParams(max_new_tokens=LENGTH)
    source = RolloutSource(rollouts, tasks, config, sampling, shuffle=True, total_steps=1)
    limits = BatchLimits(forest_tokens=FOREST_TOKENS)
    parts = PolicyParts(
        learner=LearnerGroup(group, shape),
        has_reference=True,
        batcher=Batcher("forest", limits, pad_id=0, dp_size=shape.dp),
        generator=rollouts.generator,
        source=source,
        environments={"chance": environment},
        noise_floor_of=lambda _name: 0.0,
        validation=None,
    )
    settings = GRPOSettings(
        grpo=config,
        loss=PolicyLossConfig(),
        logging=RolloutLoggerConfig(write_completions=writes),
        max_length=PROMPT + LENGTH,
        longest_completion=LENGTH,
        batch_size=num_groups * GROUP,
        updates_per_rollout=1,
    )
    state = SimpleNamespace(alarms=Alarms(config.health), run_dir=run_dir)
    names = ("schedule", "store", "selection", "logger", "progress", "deadline")
    services: Any = SimpleNamespace(
        state=state, on_validation=None, **{name: Silent() for name in names}
    )
    services.stop = SimpleNamespace(signal=None, seconds=0.0)
    return GRPO(settings, services, parts)


def measure(num_completions: int, mesh: Sequence[int], *, writes: bool) -> dict[str, Any]:
    """One step, in this process."""
    dp, tp, cp = mesh
    shape = ParallelShape(dp_shard=dp, tp=tp, cp=cp)
    group = StubGroup(shape.num_ranks, shape.each)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as directory:
        first = loop_of(
            4, group, shape, Path(directory), writes=writes
        )  # imports what a step needs
        first.take_step(Position())
        first.parts.source.close()
        before = peak_bytes()
        loop = loop_of(num_completions // GROUP, group, shape, Path(directory), writes=writes)
        group.num_sent = group.sent_bytes = 0
        with long_lived_objects():
            started, wall = time.process_time(), time.perf_counter()
            loop.take_step(Position())
            gc.collect(1)  # as the loop does after each step
            seconds, wall = time.process_time() - started, time.perf_counter() - wall
        loop.parts.source.close()
    return {
        "completions": num_completions,
        "mesh": list(mesh),
        "seconds": seconds,
        "wall_seconds": wall,
        "peak_bytes": peak_bytes() - before,
        "sent_bytes": group.sent_bytes,
        "num_sent": group.num_sent,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    options = read_options()
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1:], writes=options.write)))
        return
    rows = []
    for count in options.completions:
        for mesh in MESHES:
            command = [sys.executable, __file__, "--one", str(count), *map(str, mesh)]
            command += ["--write"] if options.write else []
            rows.append(json.loads(subprocess.run(command, check=True, stdout=-1).stdout))
            print(rows[-1], file=sys.stderr, flush=True)
    print(report(rows, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "rows": rows})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--completions", type=int, nargs="+", default=list(COMPLETIONS))
    add("--one", type=int, nargs=4, metavar=("N", "DP", "TP", "CP"), help="one row, as JSON")
    add("--write", action="store_true", help="write the file of the completions, too")
    add("--markdown", action="store_true", help="print the table for a page")
    add("--json", type=Path, default=Path("benchmark_results/driver.json"))
    return parser.parse_args()


def report(rows: Sequence[Mapping[str, Any]], *, as_markdown: bool) -> str:
    header = ["completions", "dp x tp x cp", "ranks", "seconds", "peak GB", "sent GB", "messages"]
    cells = [
        [
            f"{row['completions']:,}",
            " x ".join(map(str, row["mesh"])),
            f"{math.prod(row['mesh']):,}",
            f"{row['seconds']:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['sent_bytes'] / 1e9:.2f}",
            f"{row['num_sent']:,}",
        ]
        for row in rows
    ]
    judged = [row for row in rows if row["completions"] == TARGET_COMPLETIONS]
    text = table(header, cells, as_markdown=as_markdown)
    if judged:
        seconds = max(row["seconds"] for row in judged)
        size = max(row["peak_bytes"] for row in judged) / 1e9
        text += (
            f"\n\n{TARGET_COMPLETIONS:,} completions: {seconds:.2f} s (target {TARGET_SECONDS:g}), "
            f"{size:.2f} GB (target {TARGET_GB:g})"
        )
    return text


if __name__ == "__main__":
    main()

"""The tables of sizes in docs/sizes.md are what `laurel plan` says. `python tests/test_sizes.py`
writes them anew.

The models are their published shapes, written as configurations under the names that they have on
the hub: so the commands are those that a reader types.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from laurel.cli.plan import PlanOptions, run_plan

PAGE = Path(__file__).parents[1] / "docs" / "sizes.md"
START = "<!-- sizes: written by `python tests/test_sizes.py` from runs of `laurel plan` -->\n"
END = "<!-- end of sizes -->"
GIB = 2**30

QWEN3 = {
    "0.6B": (1024, 28, 3072, 16),
    "1.7B": (2048, 28, 6144, 16),
    "4B": (2560, 36, 9728, 32),
    "8B": (4096, 36, 12288, 32),
    "32B": (5120, 64, 25600, 64),
}
"""Width, layers, feed-forward width, heads; up to 4B embeddings and head are one matrix."""
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A row: what on which machine, and how."""

    kind: str
    what: str
    nodes: int = 1
    slots: int = 1
    memory: str
    settings: tuple[str, ...]

    @property
    def command(self) -> str:
        cluster = f"--nodes {self.nodes} --gpus-per-node {self.slots} --device-memory {self.memory}"
        settings = " ".join(shlex.quote(one) for one in self.settings)
        return f"laurel plan --for {self.kind} {cluster} {settings}"

    @property
    def machine(self) -> str:
        if "cluster.device=cpu" in self.settings:
            return f"laptop, CPU, {self.memory}"
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        return f"{nodes}{self.slots} x {self.memory}"


def qwen(size: str) -> str:
    return f"policy.model_name=Qwen/Qwen3-{size}"


CPU = ("cluster.device=cpu", "policy.precision=float32")
RECOMPUTE = "policy.dtensor_cfg.activation_checkpointing=true"
SHARE_TOKENS = "policy.dtensor_cfg.sequence_parallel=true"
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"
TP = "policy.dtensor_cfg.tensor_parallel_size={}"
VLLM_TP = "policy.generation.vllm_cfg.tensor_parallel_size={}"
LONG = "policy.max_total_sequence_length={}"
JUDGE = ("env.reward_model.enabled=true", "data.env_name=reward_model")
JUDGED_BY = "env.reward_model.model_name={}"
JUDGE_TP = "env.reward_model.dtensor_cfg.tensor_parallel_size={}"
SET_ASIDE = (
    "env.reward_model.resources.gpus_per_node={}",
    "env.reward_model.resources.num_nodes=1",
)
BATCH = ("grpo.num_prompts_per_step={}", "policy.train_global_batch_size={}")


def set_aside(slots: int) -> tuple[str, ...]:
    return SET_ASIDE[0].format(slots), SET_ASIDE[1]


REWARD_MODELS = (
    Size(
        kind="rm",
        what="0.6B",
        memory="16GiB",
        settings=(qwen("0.6B"), *CPU, LONG.format(2048), RECOMPUTE),
    ),
    Size(
        kind="rm",
        what="0.6B",
        memory="24GiB",
        settings=(qwen("0.6B"), LONG.format(4096), RECOMPUTE),
    ),
    Size(
        kind="rm",
        what="4B, LoRA",
        memory="24GiB",
        settings=(qwen("4B"), LORA, LONG.format(2048), RECOMPUTE),
    ),
    Size(kind="rm", what="1.7B", memory="80GiB", settings=(qwen("1.7B"), RECOMPUTE)),
    Size(kind="rm", what="8B", slots=8, memory="80GiB", settings=(qwen("8B"), RECOMPUTE)),
    Size(
        kind="rm",
        what="32B",
        nodes=2,
        slots=8,
        memory="80GiB",
        settings=(qwen("32B"), RECOMPUTE, TP.format(4)),
    ),
    Size(
        kind="rm",
        what="70B",
        nodes=4,
        slots=8,
        memory="80GiB",
        settings=(f"policy.model_name={LLAMA_70B}", RECOMPUTE, TP.format(8), SHARE_TOKENS),
    ),
)

POLICIES = (
    Size(
        kind="grpo",
        what="0.6B, math",
        memory="16GiB",
        settings=(
            qwen("0.6B"),
            *CPU,
            LONG.format(1024),
            RECOMPUTE,
            "loss_fn.reference_policy_kl_penalty=0",
            "policy.generation.max_concurrent=32",
        ),
    ),
    Size(
        kind="grpo",
        what="0.6B, math",
        memory="24GiB",
        settings=(qwen("0.6B"), LONG.format(2048), RECOMPUTE),
    ),
    Size(
        kind="grpo",
        what="1.7B, math",
        memory="80GiB",
        settings=(qwen("1.7B"), LONG.format(4096), RECOMPUTE),
    ),
    Size(
        kind="grpo",
        what="8B, math",
        slots=8,
        memory="80GiB",
        settings=(qwen("8B"), LONG.format(4096), RECOMPUTE),
    ),
    Size(
        kind="grpo",
        what="8B, judged by 8B",
        slots=8,
        memory="80GiB",
        settings=(
            qwen("8B"),
            LONG.format(4096),
            RECOMPUTE,
            *JUDGE,
            JUDGED_BY.format("Qwen/Qwen3-8B"),
            *set_aside(4),
        ),
    ),
    Size(
        kind="grpo",
        what="32B, judged by 8B",
        nodes=3,
        slots=8,
        memory="80GiB",
        settings=(
            qwen("32B"),
            LONG.format(4096),
            RECOMPUTE,
            TP.format(4),
            *JUDGE,
            JUDGED_BY.format("Qwen/Qwen3-8B"),
            *set_aside(8),
        ),
    ),
    Size(
        kind="grpo",
        what="70B, judged by 70B",
        nodes=4,
        slots=8,
        memory="80GiB",
        settings=(
            f"policy.model_name={LLAMA_70B}",
            LONG.format(4096),
            RECOMPUTE,
            TP.format(8),
            SHARE_TOKENS,
            "policy.train_micro_batch_size=2",
            VLLM_TP.format(8),
            BATCH[0].format(24),
            BATCH[1].format(384),
            *JUDGE,
            JUDGED_BY.format(LLAMA_70B),
            JUDGE_TP.format(4),
            *set_aside(8),
        ),
    ),
)


def write_shapes(directory: Path) -> None:
    for name, (width, layers, inner, heads) in QWEN3.items():
        Qwen3Config(
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            tie_word_embeddings=name in ("0.6B", "1.7B", "4B"),
        ).save_pretrained(directory / f"Qwen/Qwen3-{name}")
    LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ).save_pretrained(directory / LLAMA_70B)


def planned(size: Size) -> dict[str, Any]:
    """What `laurel plan --json` prints for it."""
    options = PlanOptions(
        kind=size.kind,
        num_nodes=size.nodes,
        slots_per_node=size.slots,  # type: ignore[arg-type]
        device_memory=size.memory,
        as_json=True,
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        run_plan(None, size.settings, options)
    facts: dict[str, Any] = json.loads(printed.getvalue())
    return facts


def tables() -> str:
    """Both tables; the working directory is that of the shapes."""
    return f"### Reward models\n\n{table(REWARD_MODELS)}\n\n### GRPO\n\n{table(POLICIES)}\n"


def table(sizes: tuple[Size, ...]) -> str:
    head = "| model | machine | ranks | GiB of each device | command |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *map(row, sizes)])


def row(size: Size) -> str:
    facts = planned(size)
    assert facts["fits"], (size.command, facts["misfits"])
    ranks = "<br>".join(map(_ranks, facts["roles"]))
    return f"| {size.what} | {size.machine} | {ranks} | {_memory(facts)} | `{size.command}` |"


def _ranks(role: dict[str, Any]) -> str:
    mesh = [f"{name} {size}" for name, size in role["mesh"].items() if size > 1]
    shared = f", in turns with {role['shares_with']}" if role["shares_with"] else ""
    return f"{role['name'].replace('_', ' ')} {' x '.join(mesh) or '1'}{shared}"


def _memory(facts: dict[str, Any]) -> str:
    """The largest phase of each role's devices."""
    most: dict[str, float] = {}
    for phase in facts["memory"]:
        on = phase["slots_of"].replace("_", " ")
        most[on] = max(most.get(on, 0.0), phase["total"] / GIB)
    assert most, facts["notes"]
    return "<br>".join(f"{on} {total:.1f}" for on, total in most.items())


@contextlib.contextmanager
def shapes() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        write_shapes(Path(directory))
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


@pytest.fixture
def written() -> str:
    with shapes():
        return tables()


def test_the_tables_on_the_page_are_what_the_planner_says(written: str) -> None:
    """`tables` has seen that every row fits, and that its memory was estimated."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(START)[1].split(END)[0] == written, "run `python tests/test_sizes.py`"
    assert len(re.findall(r"^\| .*`laurel plan ", written, re.M)) == len(REWARD_MODELS + POLICIES)


if __name__ == "__main__":
    before_it, rest = PAGE.read_text(encoding="utf-8").split(START)
    with shapes():
        new = tables()
    PAGE.write_text(before_it + START + new + END + rest.split(END)[1], encoding="utf-8")

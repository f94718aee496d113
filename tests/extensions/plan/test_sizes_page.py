"""docs/sizes.md shows what its commands print."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from laurel.extensions.plan.options import PlanOptions
from laurel.extensions.plan.plan import run_plan

PAGE = Path(__file__).parents[3] / "docs" / "sizes.md"
QWEN = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
# Layers, width, width of the MLP, heads, tied embeddings: of each model's configuration on the hub.
SHAPES = {
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, True),
    "Qwen/Qwen3-4B": ("qwen3", 36, 2560, 9728, 32, True),
    "Qwen/Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, False),
    "Qwen/Qwen3-32B": ("qwen3", 64, 5120, 25600, 64, False),
    "meta-llama/Llama-3.1-70B-Instruct": ("llama", 80, 8192, 28672, 64, False),
}
JUDGED = (
    "env.reward_model.enabled=true",
    "data.env_name=reward_model",
    "env.reward_model.resources.num_nodes=1",
)


def rows():
    kind = "rm"
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            kind = "rm" if line == "### Reward models" else "grpo"
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].partition(",")[0] in SHAPES:
            yield pytest.param(kind, *cells, id=f"{kind}, {cells[0]}, {cells[1]}")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    found = {}
    for name, (kind, layers, width, inner, heads, tied) in SHAPES.items():
        own = QWEN if kind == "qwen3" else QWEN | {"vocab_size": 128256}
        config = AutoConfig.for_model(
            kind,
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            tie_word_embeddings=tied,
            **own,
        )
        found[name] = tmp_path_factory.mktemp("model")
        config.save_pretrained(found[name])
    return found


@pytest.mark.parametrize(("kind", "model", "place", "ranks", "shown", "settings"), list(rows()))
def test_a_row_has_the_numbers_of_its_command(
    kind, model, place, ranks, shown, settings, directories, capsys
):
    nodes, devices, size = re.fullmatch(r"(\d+) x (\d+) x (\w+)(?:, CPU)?", place).groups()
    name = model.partition(",")[0]
    changes = [f"policy.model_name={name}", *settings.strip("`").split()]
    changes.append("policy.dtensor_cfg.activation_checkpointing=true")
    if kind == "grpo" and "max_total_sequence_length" not in settings:
        changes.append("policy.max_total_sequence_length=4096")
    if "reward model" in model:
        changes += JUDGED
    for one, directory in directories.items():
        changes = [change.replace(f"={one}", f"={directory}") for change in changes]
    options = PlanOptions(
        kind=kind,
        num_nodes=int(nodes),
        slots_per_node=int(devices),
        device_memory=size,
        as_json=True,
    )
    assert run_plan(None, changes, options)
    largest: dict[str, float] = {}
    for phase in json.loads(capsys.readouterr().out)["memory"]:
        role = phase["slots_of"].replace("_", " ")
        largest[role] = max(largest.get(role, 0.0), phase["total"] / 2**30)
    numbers = {role: f"{gib:.1f}" for role, gib in largest.items()}
    said = ", ".join(f"{role} {number}" for role, number in numbers.items())
    assert shown == (said if len(numbers) > 1 else numbers["policy"]), ranks

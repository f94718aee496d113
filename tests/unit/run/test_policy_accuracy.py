"""Measuring a policy: held-out tasks, judged by the environment they name, nothing trained."""

import io
import json

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import DataError
from laurel.run.grpo import measure_policy
from laurel.types import Message
from runs import save_model

SETTINGS = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=16",
    "policy.scratch.num_layers=1",
    "policy.scratch.num_heads=2",
    "policy.scratch.vocab_size=300",
    "policy.precision=float32",
    "policy.max_total_sequence_length=64",
    "policy.generation.max_new_tokens=4",
    "cluster.cpu_threads=1",
    "data.dataset_name=ResponseDataset",
    "data.split_validation_size=0",
    "env.math.num_workers=1",
    "grpo.val_num_generations_per_prompt=3",
    "loss_fn.distillation.model_name=./nowhere",  # which a measurement does not load
)


def config_of(tmp_path, *more):
    rows = [{"input": f"What is {n} plus {n}?", "output": str(2 * n)} for n in range(1, 5)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_config(GRPORun, None, [*SETTINGS, f"data.train_data_path={path}", *more]).config


@pytest.mark.slow
def test_every_validation_task_is_answered_and_judged(tmp_path):
    config = config_of(tmp_path, f"data.val_data_path={tmp_path / 'tasks.jsonl'}")
    console = Console(file=io.StringIO())
    measured = measure_policy(config, console=console)
    assert [group.task.prompt for group in measured.groups] == [
        (Message("user", f"What is {n} plus {n}?"),) for n in range(1, 5)
    ]
    rollouts = [rollout for group in measured.groups for rollout in group.rollouts_G]
    assert len(rollouts) == 4 * 3
    assert measured.figures["env/math/num_samples"] == 12
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    assert measured.success_rate == pytest.approx(sum(rewards) / 12)
    again = measure_policy(config, console=console)
    assert [r.messages for g in again.groups for r in g.rollouts_G] == [
        rollout.messages for rollout in rollouts
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tasks.jsonl"]


def test_without_tasks_to_measure_on_it_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"data\.val_data_path"):
        measure_policy(config_of(tmp_path), console=Console(file=io.StringIO()))


def test_completions_end_where_they_end_in_training(tmp_path):
    """At every end token of the model's generation configuration, not the template's alone."""
    model = save_model(tmp_path / "model")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    settings = {"eos_token_id": list(range(vocab_size))}
    (model / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    changes = [f"policy.model_name={model}", "policy.tokenizer.chat_template=chatml"]
    config = config_of(
        tmp_path, "policy.scratch=null", *changes, f"data.val_data_path={tmp_path / 'tasks.jsonl'}"
    )
    measured = measure_policy(config, console=Console(file=io.StringIO()))
    lengths = {len(r.ids_L) for group in measured.groups for r in group.rollouts_G}
    assert lengths == {1}

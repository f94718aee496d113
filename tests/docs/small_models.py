"""What the pages on environments and GRPO name: `results/rm`, a reward model of a few steps;
`small_policy.yaml`, a policy from nothing and small batches; `tasks.jsonl`, sums."""

import json
from pathlib import Path

from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.demo.data import errands
from laurel.observe.console import make_console
from laurel.run.reward_model import train_reward_model

POLICY = """\
policy:
  model_name: null
  scratch: {hidden_size: 32, num_layers: 1, vocab_size: 320}
  precision: float32
  max_total_sequence_length: 96
  train_global_batch_size: 16
  generation: {max_new_tokens: 8}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
data: {split_validation_size: 0.25}
cluster: {cpu_threads: 1}
"""
REWARD_MODEL = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=32",
    "policy.scratch.num_layers=1",
    "policy.scratch.vocab_size=400",
    "policy.precision=float32",
    "policy.max_total_sequence_length=128",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=32",
    "policy.optimizer.kwargs.lr=3e-3",
    "data.train_data_path=pairs.jsonl",
    "data.split_validation_size=0.2",
    "rm.max_num_steps=20",
    "rm.val_period=0",
    "checkpointing.checkpoint_dir=results/rm",
    "logger.log_dir=logs/rm",
    "cluster.cpu_threads=1",
)


def write(name: str, rows: object) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write("pairs.jsonl", errands(640, seed=0))
    write("tasks.jsonl", [{"input": f"{i} + 1?", "output": str(i + 1)} for i in range(16)])
    Path("small_policy.yaml").write_text(POLICY)
    config = load_config(RewardTrainingRun, None, REWARD_MODEL).config
    train_reward_model(config, console=make_console())

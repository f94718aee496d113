"""TRL's GRPOTrainer behind a channel: run by `grpo_step.py` under the peer's interpreter.

The trainer's own loop runs (`trainer.train()`); a callback holds it at the end of a step until the
next command comes, so all that a step does is in the time, and loading is not. Defaults are TRL's,
except what must be equal on both sides (models, prompts, completions, dtype, threads, one optimizer
step for the completions of a batch) and what would only cost time here (reports, saves, logs).
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from typing import Any

from channel import Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trl.extras import profiling  # noqa: E402

COMPLETIONS = SETTINGS["prompts"] * SETTINGS["generations"]
TIMES: defaultdict[str, float] = defaultdict(float)
"""Seconds by the names of TRL's own timers, since the last report."""


def record(timer: profiling.ProfilingContext, duration: float) -> None:
    """Where TRL's timers report to, in place of a tracking service."""
    TIMES[timer.name.removeprefix("GRPOTrainer.")] += duration


profiling.ProfilingContext._log_metrics = record


class Pacemaker(transformers.TrainerCallback):
    """Lets the trainer take as many steps as the driver asks for, and measures them."""

    def __init__(self) -> None:
        self.left = 0
        self.meter = Meter()
        self.trainer: trl.GRPOTrainer

    def wait(self, control: transformers.TrainerControl) -> None:
        command = channel.next_command()
        if command["do"] == "stop":
            control.should_training_stop = True
            return
        self.left = command["count"]
        TIMES.clear()
        self.before = weight_of(self.trainer.model)
        self.meter.start()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            cost = self.meter.read()
            check(self.trainer, self.before)
            channel.say(**cost, parts=parts_of(cost["seconds"]), logged=dict(TIMES))
            self.wait(control)


def weight_of(model: Any) -> torch.Tensor:
    return model.model.layers[0].self_attn.q_proj.weight.detach().clone()


def parts_of(seconds: float) -> dict[str, float]:
    """Where the time of a step went, in the driver's words.

    `update` is what follows the preparation of the step's inputs: forward, backward, optimizer.
    """
    reference = 0.0
    if SETTINGS["beta"]:
        # The same timer measures the pass of the update, which `compute_loss` contains.
        reference = TIMES["_prepare_inputs"] - TIMES["transformers.generate"]
        reference -= TIMES["_calculate_rewards"]
    parts = {
        "generation": TIMES["transformers.generate"],
        "reward": TIMES["_calculate_rewards"],
        "reference": reference,
        "update": seconds - TIMES["_prepare_inputs"],
    }
    return {**parts, "rest": seconds - math.fsum(parts.values())}


def check(trainer: trl.GRPOTrainer, before: torch.Tensor) -> None:
    """Nothing was left out of the step that has been timed."""
    metrics = trainer._metrics["train"]
    for key in ("completions/min_length", "completions/max_length"):
        if metrics[key][-1] != SETTINGS["new_tokens"]:
            raise SystemExit(f"the step has {key}={metrics[key][-1]}")
    if len(trainer._buffered_inputs) * trainer.args.per_device_train_batch_size != COMPLETIONS:
        raise SystemExit("the step does not learn from all of its completions")
    if not metrics["reward_std"][-1] > 0 or not math.isfinite(metrics["reward"][-1]):
        raise SystemExit(f"the rewards are {metrics['reward'][-1]} +- {metrics['reward_std'][-1]}")
    if torch.equal(weight_of(trainer.model), before):
        raise SystemExit("the step has moved no weight")


def make_trainer(pacemaker: Pacemaker) -> trl.GRPOTrainer:
    default = trl.GRPOConfig.__dataclass_fields__["per_device_train_batch_size"].default
    micro_batch = min(default, COMPLETIONS)
    arguments = trl.GRPOConfig(
        output_dir=SETTINGS["scratch_dir"],
        use_cpu=True,
        bf16=SETTINGS["dtype"] == "bfloat16",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=COMPLETIONS // micro_batch,
        num_generations=SETTINGS["generations"],
        max_completion_length=SETTINGS["new_tokens"],
        beta=SETTINGS["beta"],
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        max_steps=100_000,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **SETTINGS["overrides"],
    )
    with open(SETTINGS["rows"], encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return trl.GRPOTrainer(
        model=SETTINGS["policy"],
        reward_funcs=SETTINGS["reward_model"],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[pacemaker],
    )


def score(trainer: trl.GRPOTrainer) -> float:
    """The reward of the probe, as the trainer would give it."""
    probe = SETTINGS["probe"]
    rewards = trainer._calculate_rewards(
        [{}],
        [[{"role": "user", "content": probe["prompt"]}]],
        [[{"role": "assistant", "content": probe["answer"]}]],
        [[0]],
    )
    return float(rewards[0, 0])


def logprobs(trainer: trl.GRPOTrainer, ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens of a prompt but the first."""
    row = torch.tensor([ids])
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(
            trainer.model, row, torch.ones_like(row), len(ids) - 1
        )
    return found[0][0].tolist()


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    pacemaker = Pacemaker()
    trainer = pacemaker.trainer = make_trainer(pacemaker)
    prompt_ids = list(trainer._tokenize_prompts([trainer.train_dataset[0]["prompt"]])[0][0])
    trainer.model.eval()
    channel.say(
        program=f"TRL {trl.__version__}",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        dtype=str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompt_ids=prompt_ids,
        logprobs=logprobs(trainer, prompt_ids),
        score=score(trainer),
        activation_checkpointing=trainer.args.gradient_checkpointing,
        optimizer=str(trainer.args.optim),
        completions_of_a_pass=trainer.args.per_device_train_batch_size,
    )
    trainer.train()


if __name__ == "__main__":
    main()

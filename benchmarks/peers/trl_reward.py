"""TRL's RewardTrainer behind a channel: run by `rm_training.py` under the peer's interpreter.

The trainer's own loop runs (`trainer.train()`); a callback holds it at the end of a step until the
next command comes, so the data loader, the optimizer and the schedule are in the time, and loading
and tokenising are not. Defaults are TRL's, except what must be equal on both sides (model, rows,
batch, dtype, threads) and what would only cost time here (reports, saves, logs).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from channel import Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402


class Pacemaker(transformers.TrainerCallback):
    """Lets the trainer take as many steps as the driver asks for, and measures them."""

    def __init__(self) -> None:
        self.left = 0
        self.meter = Meter()

    def wait(self, control: transformers.TrainerControl) -> None:
        command = channel.next_command()
        if command["do"] == "stop":
            control.should_training_stop = True
            return
        self.left = command["count"]
        self.meter.start()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            channel.say(**self.meter.read())
            self.wait(control)


def make_trainer() -> trl.RewardTrainer:
    micro_batch = SETTINGS["micro_batch_pairs"]
    arguments = trl.RewardConfig(
        output_dir=SETTINGS["scratch_dir"],
        use_cpu=True,
        bf16=SETTINGS["dtype"] == "bfloat16",
        max_length=None,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=SETTINGS["batch_pairs"] // micro_batch,
        max_steps=100_000,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **SETTINGS["overrides"],
    )
    with open(SETTINGS["rows"], encoding="utf-8") as lines:
        rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    return trl.RewardTrainer(
        model=SETTINGS["model"], args=arguments, train_dataset=rows, callbacks=[Pacemaker()]
    )


def first_loss(trainer: trl.RewardTrainer) -> float:
    """The loss of the first rows before training: both sides must find the same."""
    rows = [trainer.train_dataset[index] for index in range(SETTINGS["probe_pairs"])]
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, trainer.data_collator(rows)))


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    trainer = make_trainer()
    loss = first_loss(trainer)
    trainer.model.train()
    rows = trainer.train_dataset
    channel.say(
        program=f"TRL {trl.__version__}",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        rows=len(rows),
        sequence_tokens=sum(map(len, rows["chosen_ids"])) + sum(map(len, rows["rejected_ids"])),
        first_loss=loss,
        dtype=SETTINGS["dtype"],
        threads=torch.get_num_threads(),
        activation_checkpointing=trainer.args.gradient_checkpointing,
        optimizer=str(trainer.args.optim),
    )
    trainer.train()


if __name__ == "__main__":
    main()

"""TRL's RewardTrainer over a file in its order: the loss of each step, for `rm_losses.py`.

Run under the peer's interpreter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])


class InOrder(trl.RewardTrainer):
    """The trainer with rows in the order of the file; it keeps the loss of every step."""

    losses: list[float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        value = loss[0] if isinstance(loss, tuple) else loss
        self.losses.append(float(value.detach()))
        return loss

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    beta1, beta2 = SETTINGS["betas"]
    arguments = trl.RewardConfig(
        output_dir=str(Path(SETTINGS["work"]) / "trl"),
        use_cpu=True,
        bf16=False,
        max_length=None,
        per_device_train_batch_size=SETTINGS["pairs"],
        max_steps=SETTINGS["steps"],
        learning_rate=SETTINGS["lr"],
        lr_scheduler_type="constant",
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=SETTINGS["eps"],
        weight_decay=0.0,
        max_grad_norm=SETTINGS["clip"],
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    with open(SETTINGS["rows"], encoding="utf-8") as lines:
        rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    trainer = InOrder(model=SETTINGS["model"], args=arguments, train_dataset=rows)
    trainer.losses = []
    trainer.train()
    trainer.save_model(str(Path(SETTINGS["work"]) / "trl_model"))
    Path(SETTINGS["written"]).write_text(json.dumps(trainer.losses), encoding="utf-8")


if __name__ == "__main__":
    main()

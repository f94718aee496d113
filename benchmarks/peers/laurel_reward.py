"""Laurel's reward-model training behind a channel: run by `rm_training.py`.

The same parts as `laurel rm` (see `run/reward_model.py`): the scoring contract makes the
tokens, the batcher the micro-batches, the learner takes the steps. Loading and tokenising are not
in the time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from channel import Channel, serve_steps

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import torch  # noqa: E402
import transformers  # noqa: E402

import laurel  # noqa: E402
from laurel.config.policy import RewardPolicyConfig  # noqa: E402
from laurel.config.reward_model import LossConfig  # noqa: E402
from laurel.data.forest import Batcher, MicroBatch  # noqa: E402
from laurel.models.loading.reward_model import load_reward_model  # noqa: E402
from laurel.models.scoring import ScoringContract  # noqa: E402
from laurel.run.model import model_spec  # noqa: E402
from laurel.training.epochs import StepOrder  # noqa: E402
from laurel.training.learner import LocalLearner  # noqa: E402
from laurel.training.losses import RewardLoss  # noqa: E402
from laurel.types import (  # noqa: E402
    Completion,
    Conversation,
    Group,
    Message,
    Preference,
    PreferenceSample,
)
from laurel.workers.process import prepare  # noqa: E402

SEED = 42
LONGEST = 1_000_000
"""Tokens of a conversation: nothing is cut."""


def read_rows(path: Path) -> list[Preference]:
    """The rows as judged groups: the same file that the peer reads."""

    def messages(turns: list[dict[str, str]]) -> Conversation:
        return tuple(Message(turn["role"], turn["content"]) for turn in turns)

    rows: list[Preference] = []
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        answers = [messages(row["chosen"]), messages(row["rejected"])]
        group = Group(
            id=str(index),
            prompt=messages(row["prompt"]),
            completions_G=tuple(Completion(messages=answer) for answer in answers),
        )
        rows.append(Preference(group=group, ranks_G=(0, 1), source=f"{path}:{index + 1}"))
    return rows


def encode(contract: ScoringContract, rows: list[Preference]) -> list[PreferenceSample]:
    tokens = contract.encode([row.group for row in rows])
    return [
        PreferenceSample(preference=row, tokens=group)
        for row, group in zip(rows, tokens, strict=True)
    ]


def cut(batcher: Batcher, samples: list[PreferenceSample]) -> list[MicroBatch[Preference]]:
    return batcher.cut(
        [sample.tokens for sample in samples], [sample.preference for sample in samples]
    )


def main() -> None:
    policy = RewardPolicyConfig.model_validate(
        {
            "model_name": SETTINGS["model"],
            "precision": SETTINGS["dtype"],
            # TRL's own defaults, so that both sides take the same steps
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4, "weight_decay": 0.0}},
            "max_grad_norm": 1.0,
            "train_micro_batch_size": SETTINGS["micro_batch_pairs"],
            **SETTINGS["overrides"],
        }
    )
    device = prepare("cpu", cpu_threads=SETTINGS["threads"], seed=SEED)
    loaded = load_reward_model(
        model_spec(policy), seed=SEED, max_length=LONGEST, truncation_side="left", device=device
    )
    samples = encode(loaded.contract, read_rows(Path(SETTINGS["rows"])))
    learner = LocalLearner(
        loaded.model, optimizer=policy.optimizer, max_grad_norm=policy.max_grad_norm
    )
    loss = RewardLoss(LossConfig())
    limits = policy.batch_limits
    if SETTINGS["shares"] != "all":
        prompts = SETTINGS["shares"] == "prompts"
        limits = replace(limits, least_shared=None, share_prompts=prompts)
    batcher = Batcher(loaded.model.path, limits, pad_id=loaded.contract.rules.pad_id or 0)

    def first_loss(num_pairs: int) -> float:
        batch = cut(batcher, samples[:num_pairs])
        outputs = learner.outputs([b.inputs for b in batch])
        pairs = zip(outputs, batch, strict=True)
        return float(sum(loss(o, b.labels, num_groups=num_pairs).loss for o, b in pairs))

    order = StepOrder(len(samples), SETTINGS["batch_pairs"], shuffle=True, seed=SEED)
    steps = iter(range(sys.maxsize))
    computed: list[int] = []

    def step() -> None:
        chosen = [samples[row] for row in order.rows(next(steps))]
        batch = cut(batcher, chosen)
        computed.append(sum(micro.num_tokens for micro in batch))
        update = learner.update(batch, loss)
        assert update.failure is None, update.failure

    channel.say(
        program=f"Laurel {laurel.__version__}",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        rows=len(samples),
        sequence_tokens=sum(sum(sample.tokens.lengths_G) for sample in samples),
        distinct_tokens=sum(sample.tokens.num_tokens for sample in samples),
        first_loss=first_loss(SETTINGS["probe_pairs"]),
        dtype=SETTINGS["dtype"],
        threads=torch.get_num_threads(),
        activation_checkpointing=policy.dtensor_cfg.activation_checkpointing,
        path=loaded.model.path,
        optimizer=type(learner.optimizer).__name__,
    )
    serve_steps(channel, step)


if __name__ == "__main__":
    main()

"""Laurel's GRPO behind a channel: run by `grpo_step.py`.

The run that `laurel grpo` would begin (`run.grpo.assemble`), with its logs, tables and
timers. Its steps are taken one by one, as the driver asks for them.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from channel import Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import torch  # noqa: E402
import transformers  # noqa: E402
from rich.console import Console  # noqa: E402

import laurel  # noqa: E402
from laurel.config.grpo_run import GRPORun  # noqa: E402
from laurel.config.load import load_config  # noqa: E402
from laurel.grpo.loop import GRPO  # noqa: E402
from laurel.models.chat import ChatFormat  # noqa: E402
from laurel.run.generator import probe_of  # noqa: E402
from laurel.run.grpo import assemble  # noqa: E402
from laurel.training.stopping import Position  # noqa: E402

TIMED = "timing/train/"
UPDATE = "policy_training"


def configuration() -> GRPORun:
    """A file as a user would write it. What is not in it is Laurel's default."""
    completions = SETTINGS["prompts"] * SETTINGS["generations"]
    written = {
        "grpo": {
            "num_prompts_per_step": SETTINGS["prompts"],
            "num_generations_per_prompt": SETTINGS["generations"],
            "val_period": 0,
            "val_at_end": False,
            # TRL's own defaults, so that both sides take the same steps
            "adv_estimator": {"use_leave_one_out_baseline": False},
        },
        "loss_fn": {"reference_policy_kl_penalty": SETTINGS["beta"]},
        "policy": {
            "model_name": SETTINGS["policy"],
            "precision": SETTINGS["dtype"],
            "train_global_batch_size": completions,
            "max_total_sequence_length": SETTINGS["max_length"],
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": SETTINGS["learning_rate"], "weight_decay": 0.0},
            },
            "generation": {"backend": "transformers", "max_new_tokens": SETTINGS["new_tokens"]},
            **SETTINGS["overrides"],
        },
        "data": {
            "train": {
                "dataset_name": "ResponseDataset",
                "data_path": SETTINGS["rows"],
                "input_key": "prompt",
            },
            "env_name": "reward_model",
            "shuffle": False,
            "split_validation_size": 0.0,
        },
        "env": {
            "reward_model": {
                "enabled": True,
                "model_name": SETTINGS["reward_model"],
                "precision": SETTINGS["dtype"],
                "max_model_len": 4096,
                **SETTINGS.get("reward", {}),
            }
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": SETTINGS["scratch_dir"] + "/logs"},
        "cluster": {
            "device": "cpu",
            "cpu_threads": SETTINGS["threads"],
            **SETTINGS.get("cluster", {}),
        },
    }
    path = Path(SETTINGS["scratch_dir"]) / f"laurel-{SETTINGS['name']}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written), encoding="utf-8")  # JSON is YAML
    return load_config(GRPORun, path, []).config


class Steps:
    """The steps of one run."""

    def __init__(self, training: GRPO, position: Position) -> None:
        self._training = training
        self._position = position
        self._log = training.state.run_dir / "metrics.jsonl"

    def take(self) -> None:
        self._position = self._training.take_step(self._position)

    def latest(self) -> dict[str, float]:
        """What the run logged of its latest step."""
        line = self._log.read_text(encoding="utf-8").splitlines()[-1]
        logged: dict[str, float] = json.loads(line)
        return logged


def parts_of(logged: Mapping[str, float]) -> dict[str, float]:
    """Where the time of a step went, in the driver's words.

    Completions are scored while others are still being drawn: what that costs is part of the
    generation, and `reward` is what is waited for afterwards.
    """
    times = {key.removeprefix(TIMED): value for key, value in logged.items() if TIMED in key}
    exposed = times["rollout/environment_exposed"]
    reference = times["policy_and_reference_logprobs"]
    parts = {
        "generation": times["generation"] - exposed,
        "reward": exposed,
        "reference": reference if SETTINGS["beta"] else 0.0,
        "update": times[UPDATE],
    }
    parts["rest"] = times["total_step_time"] - math.fsum(parts.values())
    return parts


def check(logged: Mapping[str, float]) -> None:
    """Nothing was left out of the step that is being timed."""
    completions = SETTINGS["prompts"] * SETTINGS["generations"]
    wanted = {
        "train/mean_gen_tokens_per_sample": SETTINGS["new_tokens"],
        "train/optimizer_steps": 1,
        "train/num_valid_samples": completions,
    }
    if SETTINGS.get("lengths_vary"):
        del wanted["train/mean_gen_tokens_per_sample"]
    for key, value in wanted.items():
        if logged[key] != value:
            raise SystemExit(f"the step has {key}={logged[key]}, not {value}")
    if not logged["train/grad_norm"] > 0:
        raise SystemExit("the step has no gradient")


def main() -> None:
    probe = SETTINGS["probe"]
    with ExitStack() as stack:
        config = configuration()
        training, position = assemble(config, stack, console=Console(file=sys.stderr))
        parts = training.parts
        learner: Any = parts.learner
        verdict = parts.environments["reward_model"].step(
            [
                [
                    {"role": "user", "content": probe["prompt"]},
                    {"role": "assistant", "content": probe["answer"]},
                ]
            ],
            [{}],
        )
        facts = getattr(learner, "facts", None)  # of a model that is in other processes
        tokenizer = facts.tokenizer if facts else learner.tokenizer
        chat = ChatFormat(copy.deepcopy(tokenizer))
        prompt_ids = chat.prompt_ids(parts.source.tasks[0].prompt).tolist()
        channel.say(
            program=f"Laurel {laurel.__version__}",
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            dtype=facts.weights_dtype
            if facts
            else str(next(learner.model.parameters()).dtype).removeprefix("torch."),
            threads=SETTINGS["threads"] if facts else torch.get_num_threads(),
            prompt_ids=prompt_ids,
            logprobs=probe_of(learner, parts.batcher.path)(prompt_ids).tolist(),
            score=float(verdict.rewards[0]),
            activation_checkpointing=config.policy.dtensor_cfg.activation_checkpointing,
            optimizer=config.policy.optimizer.name.rpartition(".")[2],
        )
        steps, meter = Steps(training, position), Meter()
        stack.enter_context(training.services.progress)
        while (command := channel.next_command())["do"] == "steps":
            meter.start()
            for _ in range(command["count"]):
                steps.take()
            cost = meter.read()
            logged = steps.latest()
            check(logged)
            channel.say(**cost, parts=parts_of(logged), logged=logged)


if __name__ == "__main__":
    main()

# %% [markdown]
# # Watch reward hacking
#
# A policy learns what is rewarded, which is never quite what is wanted. Where the reward is a
# model of people's taste, it often gets better at both at first. Then it finds what the model
# likes and people do not.
#
# This notebook lets that happen on a small scale, in about a minute, without network or GPU: a
# reward model that learned to like **long** answers, a policy that learns from it, a checker that
# says what was really wanted, and the alarms that Laurel raises on the way.

# %%
import random
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

from laurel import api
from laurel.demo.data import NUMBER_REQUESTS, boxed, in_words, numbers
from laurel.environments.interface import EnvironmentInterface, EnvironmentReturn, response_of

plt.style.use("tableau-colorblind10")  # colours that everybody can tell apart
SEED = 0  # of all that is drawn by chance; try others
here = Path("results/hacking-notebook")
shutil.rmtree(here, ignore_errors=True)  # each run of the notebook begins anew
here.mkdir(parents=True)

# %% [markdown]
# ## The task, and idle words
#
# A number in words is to be written in digits, inside `\boxed{}`. An answer may begin with idle
# words, which help nobody. What we want is that the number is right.


# %%
def answers(count, seed):
    """Requests with a function that answers them: rightly or not, with so many idle words."""
    generator = random.Random(1000 * SEED + seed)
    for _ in range(count):
        number = generator.choice(numbers(held_out=False))

        def answer(is_right, idle, number=number):
            digits = str(number)
            while not is_right and digits == str(number):
                place = generator.randrange(3)
                digits = digits[:place] + generator.choice("123456789") + digits[place + 1 :]
            return "well , " * idle + boxed(digits)

        yield generator, generator.choice(NUMBER_REQUESTS).format(in_words(number)), number, answer


generator, prompt, number, answer = next(answers(1, seed=0))
[prompt, answer(True, idle=0), answer(False, idle=2)]

# %% [markdown]
# ## A policy
#
# It learns from demonstrations. Six in ten are right, and some begin with idle words, so it does
# both now and then: what is never tried cannot be learned.


# %%
def write(name, rows):
    path = here / f"{name}.jsonl"
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)
    return str(path)


def demonstrations(count, seed):
    for generator, prompt, _, answer in answers(count, seed):
        said = answer(generator.random() < 0.6, idle=generator.randrange(4))
        roles = {"user": prompt, "assistant": said}
        yield {"messages": [{"role": role, "content": text} for role, text in roles.items()]}


tiny = {
    "policy.precision": "float32",
    "policy.max_total_sequence_length": 64,
    "policy.train_micro_batch_size": 32,
    "policy.train_global_batch_size": 32,
    "checkpointing.save_period": 1000,
    "checkpointing.metric_name": None,
    "cluster.cpu_threads": 1,  # a model this small gains nothing from a second one
    "logger.tensorboard_enabled": False,
    "logger.num_val_samples_to_print": 0,
}
policy = api.train(
    "sft",
    tiny
    | {
        "policy.model_name": None,
        "policy.scratch.hidden_size": 64,
        "policy.scratch.num_layers": 2,
        "policy.scratch.vocab_size": 350,
        "policy.scratch.config_overrides": {"initializer_range": 0.1},
        "policy.optimizer.kwargs.lr": 3e-3,
        "data.train_data_path": write("demonstrations", demonstrations(6400, seed=0)),
        "data.split_validation_size": 0,
        "sft.max_num_steps": 200,
        "sft.seed": SEED,
        "sft.val_period": 0,
        "checkpointing.checkpoint_dir": here / "policy",
        "logger.log_dir": here / "logs-sft",
    },
    quiet=True,
).latest

# %% [markdown]
# ## A reward model with a bias
#
# It learns from pairs, as reward models do. Two thirds of the judges looked at the number: a right
# answer against a wrong one, equally long. The others were in a hurry and took **the longer one**,
# right or not.


# %%
def preferences(count, seed):
    for generator, prompt, _, answer in answers(count, seed):
        more = generator.randrange(1, 6)
        if generator.random() < 0.65:
            chosen, rejected = answer(True, idle=more), answer(False, idle=more)
        else:
            fewer = generator.randrange(more)
            chosen = answer(generator.random() < 0.5, idle=more)
            rejected = answer(generator.random() < 0.5, idle=fewer)
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


reward_model = api.train(
    "rm",
    tiny
    | {
        "policy.model_name": policy,
        "policy.optimizer.kwargs.lr": 2e-3,
        "data.dataset_name": "BinaryPreferenceDataset",
        "data.train_data_path": write("preferences", preferences(4800, seed=1)),
        "rm.max_num_steps": 150,
        "rm.seed": SEED,
        "rm.max_num_epochs": 2,
        "rm.val_period": 0,
        "rm.val_at_end": False,
        "checkpointing.checkpoint_dir": here / "reward-model",
        "logger.log_dir": here / "logs-rm",
    },
    quiet=True,
).latest

# %% [markdown]
# Does it like length? `evaluate` says so before any policy is spoilt by it: on fresh pairs of a
# *right, short* answer and a *wrong, long* one, a judge of numbers would be right every time.


# %%
def short_but_right(count, seed):
    for _, prompt, _, answer in answers(count, seed):
        yield {"prompt": prompt, "chosen": answer(True, idle=0), "rejected": answer(False, idle=4)}


evaluation = api.evaluate(
    "pairs", reward_model, [write("short", short_but_right(200, seed=2))], cpu_threads=1, quiet=True
)
right_on_short = evaluation.measured.final.value
print(f"right on {right_on_short:.0%} of the pairs whose right answer is the short one")

# %% [markdown]
# ## What is really wanted
#
# An environment of our own says whether the number in the box is right (the notebook *Write an
# environment* explains how; `math` would do as well). Many such rules are too slow or too rare to
# be rewarded, but can be measured.


# %%
class Right(EnvironmentInterface):
    """1 where the answer ends with the right number in a box."""

    def step(self, message_log_batch, metadata):
        count = len(message_log_batch)
        pairs = zip(message_log_batch, metadata, strict=True)
        right = [response_of(log).endswith(boxed(one["ground_truth"])) for log, one in pairs]
        return EnvironmentReturn(
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.ones(count, dtype=torch.bool),
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=[None] * count,
            next_stop_strings=[None] * count,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"share": float(batch["rewards"].mean())}


# %% [markdown]
# ## GRPO against the reward model, with the truth watched
#
# The reward is that of the reward model alone. `Right` judges every answer as well, with weight 0:
# it pays for nothing and is only logged. `grpo.health.gold_metric` names its figure as what is
# wanted.
#
# The alarms compare with the first steps of the run, and each step with those before it.


# %%
def tasks(count, seed):
    for _, prompt, number, _ in answers(count, seed):
        yield {"input": prompt, "output": str(number)}


GOLD = "env/judged/right/share"
STEPS = 36
parts = [{"env": "reward_model", "weight": 1.0}, {"env": "right", "weight": 0.0}]
outcome = api.train(
    "grpo",
    tiny
    | {
        "policy.model_name": policy,
        "env.custom.right.name": "__main__.Right",
        "env.composite.judged.parts": parts,
        "env.reward_model.enabled": True,
        "env.reward_model.model_name": str(reward_model),
        "env.reward_model.precision": "float32",
        "data.train_data_path": write("tasks", tasks(STEPS * 32, seed=3)),
        "data.env_name": "judged",
        "data.split_validation_size": 0,
        "policy.train_global_batch_size": 128,
        "policy.train_micro_batch_size": 64,
        "policy.optimizer.kwargs.lr": 1.5e-4,
        "policy.generation.max_new_tokens": 24,
        "loss_fn.reference_policy_kl_penalty": 0.001,
        "grpo.num_prompts_per_step": 32,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": STEPS,
        "grpo.seed": SEED,
        "grpo.val_period": 0,
        "grpo.health.gold_metric": GOLD,
        "checkpointing.enabled": False,
        "logger.log_dir": here / "logs",
    },
)

# %% [markdown]
# ## The curve
#
# Reward is what was paid for (the proxy), the share of right answers what was wanted (the gold).
# Each is the mean of nine steps, for a step alone is noisy.

# %%
run = api.read_run(outcome.run_dir)
names = {
    "reward": "train/reward",
    "gold": GOLD,
    "divergence": "train/kl_penalty",
    "length": "train/mean_gen_tokens_per_sample",
}
curves = pd.DataFrame({name: run.series(metric).values for name, metric in names.items()})
curves.index += 1  # steps are counted from 1
smooth = curves.rolling(9, center=True, min_periods=5).mean()
peak = int(smooth.gold.idxmax())
below = smooth.index[(smooth.index > peak) & (smooth.gold < 0.9 * smooth.gold[peak])]
fallen = int(below[0]) if len(below) else None  # with some seeds it takes more steps
raised = [line for line in run.health if line["state"] == "raised"]
alarms = pd.DataFrame(raised, columns=["step", "alarm", "metric", "value", "threshold"])
first_alarm = int(alarms.step.min()) if raised else None
alarms


# %%
def proxy_and_gold(axes, x, xlabel):
    axes.plot(x, smooth.gold, color="C0", label="gold: share of right answers")
    axes.set(xlabel=xlabel, ylabel="right answers (gold)", ylim=(0, None))
    other = axes.twinx()
    other.plot(x, smooth.reward, "--", color="C1", label="proxy: the reward model's score")
    other.set_ylabel("mean reward (proxy)")
    return [*axes.get_lines(), *other.get_lines()]


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
lines = proxy_and_gold(left, smooth.index, "step")
if first_alarm:
    lines.append(left.axvline(first_alarm, color="black", linestyle=":", label="first alarm"))
if fallen:
    lines.append(left.axvline(fallen, color="black", label="gold has lost a tenth"))
proxy_and_gold(right, smooth.divergence, "divergence from where it began (KL, nats a token)")
figure.legend(handles=lines, loc="outside upper center", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# Gold rises a little at first, and ends far below where it began, while the reward only grows. To
# the right is the picture that Gao et al. drew (arXiv 2210.10760): the further the policy moves
# from where it began, the better it looks to the reward model, and from some distance on the worse
# it is. **Nothing in the reward says so.** Who watches the reward alone sees a run that goes well.

# %%
print("First alarm:", f"{alarms.alarm[0]}, at step {first_alarm}" if raised else "none")
print("Gold had lost a tenth of its peak:", f"at step {fallen}" if fallen else "never")

# %% [markdown]
# That alarm needs no gold metric, which few runs have. It reads what a run logs anyway: within a
# group the longer answers earn more, and lengths have begun to grow. `overoptimisation`, the next
# one, holds gold against the reward.
#
# ## What it says in the end


# %%
def samples(step, count=4):
    rows = pd.read_parquet(run.completion_file(step))
    return rows.sample(count, random_state=0)[["completion", "expected", "reward"]].round(2)


samples(1)

# %%
samples(STEPS)

# %% [markdown]
# ## With other seeds
#
# One run is one story. Another `SEED` above tells another, and so does another rounding: this is
# what five of them gave on 23 November 2026, when attention was computed segment by segment and
# alarms said nothing before step 15 (gold is now compared with its peak from step 2 on):
#
# | seed | 0 | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|---|
# | gold at the start | 0.53 | 0.41 | 0.39 | 0.54 | 0.63 |
# | gold at its peak, and the step | 0.56, 14 | 0.42, 3 | 0.43, 11 | 0.54, 1 | 0.70, 36 |
# | gold at the end | 0.16 | 0.09 | 0.19 | 0.49 | 0.70 |
# | gold has lost a tenth at step | 20 | 9 | 23 | 29 | never |
# | first alarm at step | 16 | 15 | 15 | 21 | 15 |
#
# That alarm is `overoptimisation` with seed 1, and `length_bias` with the others.
#
# - **In all five** the reward model has the bias, the reward is higher in the end, answers are
#   longer, and an alarm is raised.
# - **Not in all:** gold falls in four, below half of its peak in three. With seed 4 the policy
#   still gets better at both after 36 steps, and only its lengths show the bias.
# - **Of the four losses the alarm precedes three.** With seed 1 gold has lost a tenth by step 9,
#   before any alarm. An alarm is a help, and no guarantee.
#
# ## What people do about it
#
# - Take the checkpoint at the peak of a validation by the gold metric
#   (`checkpointing.metric_name`), or let the alarm end the run:
#   `grpo.health.stop_on=[length_bias]`.
# - A larger `loss_fn.reference_policy_kl_penalty`: the policy stays nearer to where it began.
# - Mend the reward model: pairs of equal length, or pairs drawn from this very policy.
# - Give the checker a weight above 0.
#
# All alarms, their thresholds and how often they are right: `docs/reward_hacking.md`.

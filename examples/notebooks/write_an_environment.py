# %% [markdown]
# # Write an environment
#
# In reinforcement learning an **environment** says what an answer is worth. Laurel brings some:
# for mathematics, for programs, for reward models. What you want is often none of them, and then
# you write a class with two methods.
#
# This notebook writes one, tries it by hand, trains a policy against it with GRPO and looks at
# what the policy says before and after. It needs no network and no GPU, and takes less than a
# minute.

# %%
import random
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

from laurel import api
from laurel.demo.data import NUMBER_REQUESTS, boxed, in_words, numbers
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    response_of,
)

plt.style.use("tableau-colorblind10")  # colours that everybody can tell apart
SEED = 0  # of all that is drawn by chance; try others
here = Path("results/environment-notebook")
shutil.rmtree(here, ignore_errors=True)  # each run of the notebook begins anew
here.mkdir(parents=True)

# %% [markdown]
# ## The environment
#
# The task: a number in words is to be written in digits, inside `\boxed{}`. We want to give part
# of the reward for a part of the digits, which no ready-made environment does.
#
# - `step` is given conversations and what the data says of each (`metadata`). It returns a reward
#   for each, whether the conversation is over, and, if it is not, what the environment says next.
# - `global_post_process_and_metrics` is given a whole batch. What it returns is logged as
#   `env/<name>/<figure>`.


# %%
class Digits(EnvironmentInterface):
    """The share of the digits in the box that are right; nothing where their number is wrong."""

    spec = EnvironmentSpec(judges="completion")  # each by itself, as soon as it ends

    def step(self, message_log_batch, metadata):
        answers = [response_of(log) for log in message_log_batch]
        wanted = [one["ground_truth"] for one in metadata]
        count = len(answers)
        return EnvironmentReturn(
            rewards=torch.tensor([self.share(*pair) for pair in zip(answers, wanted, strict=True)]),
            terminateds=torch.ones(count, dtype=torch.bool),  # one turn is all there is
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=[None] * count,
            next_stop_strings=[None] * count,
        )

    def share(self, answer, wanted):
        digits = answer.partition("\\boxed{")[2].partition("}")[0]
        if len(digits) != len(wanted):
            return 0.0
        return sum(one == other for one, other in zip(digits, wanted, strict=True)) / len(wanted)

    def global_post_process_and_metrics(self, batch):
        rewards = batch["rewards"]
        return batch, {"all_digits": float((rewards == 1).float().mean())}


# %% [markdown]
# ## By hand first
#
# An environment is a plain object. Most mistakes show when you try the answers that you expect,
# and some that you do not: no box, an empty one, two of them.

# %%
environment = Digits()
tries = [
    "\\boxed{342}",
    "\\boxed{349}",
    "\\boxed{34}",
    "342",
    "\\boxed{}",
    "\\boxed{1}\\boxed{342}",
]
question = {"role": "user", "content": "Write three hundred forty-two in digits."}
logs = [[question, {"role": "assistant", "content": answer}] for answer in tries]
verdict = environment.step(logs, [{"ground_truth": "342"}] * len(tries))
pd.DataFrame({"answer": tries, "reward": verdict.rewards.numpy().round(2)})

# %% [markdown]
# The last line is a decision: who writes two boxes is judged by the first. A policy finds such
# corners sooner than you do, so look at them before it does.
#
# ## A policy that is often wrong
#
# GRPO needs a policy that is right now and then. You would take a language model
# (`"policy.model_name": "Qwen/Qwen3-0.6B"`). Here a tiny one learns from demonstrations, six in
# ten of which show another number than was asked for.

# %%
tiny = {
    "policy.precision": "float32",
    "policy.max_total_sequence_length": 64,
    "policy.train_micro_batch_size": 32,
    "checkpointing.save_period": 1000,
    "checkpointing.metric_name": None,
    "cluster.cpu_threads": 1,  # a model this small gains nothing from a second one
    "logger.tensorboard_enabled": False,
    "logger.num_val_samples_to_print": 0,
}


def asked(count, seed, held_out=False):
    """Requests, and the numbers that they are about."""
    generator = random.Random(1000 * SEED + seed)
    for _ in range(count):
        number = generator.choice(numbers(held_out=held_out))
        yield generator, generator.choice(NUMBER_REQUESTS).format(in_words(number)), number


def demonstrations(count, seed):
    for generator, prompt, number in asked(count, seed):
        shown = number if generator.random() < 0.4 else generator.randrange(100, 1000)
        roles = {"user": prompt, "assistant": boxed(shown)}
        yield {"messages": [{"role": role, "content": text} for role, text in roles.items()]}


def write(name, rows):
    path = here / f"{name}.jsonl"
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)
    return str(path)


# %%
warmed_up = api.train(
    "sft",
    tiny
    | {
        "policy.model_name": None,
        "policy.scratch.hidden_size": 64,
        "policy.scratch.num_layers": 2,
        "policy.scratch.vocab_size": 350,
        "policy.scratch.config_overrides": {"initializer_range": 0.1},
        "policy.train_global_batch_size": 32,
        "policy.optimizer.kwargs.lr": 3e-3,
        "data.train_data_path": write("demonstrations", demonstrations(6400, seed=0)),
        "data.split_validation_size": 0,
        "sft.max_num_steps": 200,
        "sft.seed": SEED,
        "sft.val_period": 0,
        "checkpointing.checkpoint_dir": here / "warmed-up",
        "logger.log_dir": here / "logs-sft",
    },
    quiet=True,
)

# %% [markdown]
# ## GRPO with it
#
# A task is a prompt (`input`) and what its environment judges by (`output`, which `step` finds as
# `ground_truth`). `env.custom` gives a class a name that tasks can use. `__main__` is this
# notebook; in a project the class stands in a module, and the setting is `my_environments.Digits`.
#
# In each step 16 prompts are answered eight times each, and answers that earned more than the
# others of their group become likelier. The numbers of the validation tasks occur in no training
# row.


# %%
def tasks(count, seed, held_out=False):
    for _, prompt, number in asked(count, seed, held_out):
        yield {"input": prompt, "output": str(number)}


def task_set(name, rows):
    return {
        "dataset_name": "ResponseDataset",
        "data_path": write(name, rows),
        "env_name": "digits",
    }


STEPS = 40
outcome = api.train(
    "grpo",
    tiny
    | {
        "policy.model_name": warmed_up.latest,
        "env.custom.digits.name": "__main__.Digits",
        "data.train": task_set("tasks", tasks(STEPS * 16, seed=1)),
        "data.validation": task_set("held_out", tasks(128, seed=2, held_out=True)),
        "policy.train_global_batch_size": 64,
        "policy.optimizer.kwargs.lr": 1e-3,
        "policy.generation.max_new_tokens": 12,
        "loss_fn.reference_policy_kl_penalty": 0.001,
        "grpo.num_prompts_per_step": 16,
        "grpo.num_generations_per_prompt": 8,
        "grpo.max_num_steps": STEPS,
        "grpo.seed": SEED,
        "grpo.val_at_start": True,
        "grpo.val_period": 10,
        "checkpointing.checkpoint_dir": here / "checkpoints",
        "logger.log_dir": here / "logs",
    },
)

# %% [markdown]
# ## Did it learn?
#
# Two curves: what it was paid for, and the figure of our own, on tasks that it did not learn from.

# %%
run = api.read_run(outcome.run_dir)
reward = run.series("train/reward")
held_out = run.series("validation/reward_mean")
exact = run.series("validation/env/digits/all_digits")

figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
axes.plot(reward.steps, reward.values, color="C0", label="reward of the training batch")
axes.plot(held_out.steps, held_out.values, "o-", color="C1", label="reward, held-out numbers")
axes.plot(exact.steps, exact.values, "s--", color="C3", label="all digits right, held-out numbers")
axes.set(xlabel="step", ylabel="share", ylim=(0, 1))
axes.legend()
plt.show()

# %% [markdown]
# ## Read what it says
#
# A curve that rises is no proof. Every run keeps its completions with their rewards, one file a
# step:


# %%
def samples(step, count=5):
    rows = pd.read_parquet(run.completion_file(step))
    return rows.sample(count, random_state=0)[["prompt", "completion", "expected", "reward"]]


samples(1).round(2)

# %%
samples(STEPS).round(2)

# %% [markdown]
# `laurel report` makes one page of all this, with the signs of trouble first.
#
# ## With other seeds
#
# Another `SEED` above gives another run. On the held-out numbers, before and after the 40 steps:
#
# | seed | 0 | 1 | 2 |
# |---|---|---|---|
# | reward | 0.36, 0.81 | 0.23, 0.70 | 0.28, 0.82 |
# | all digits right | 9 %, 62 % | 2 %, 41 % | 2 %, 62 % |
#
# Both rise in all three; how far they get in 40 steps differs.
#
# ## From here
#
# - **Several turns:** leave `terminateds` false and put what the environment says into
#   `observations`; `metadata` carries what it has to remember until the next call.
# - **Several aims:** `env.composite` adds environments with weights. One of weight 0 is measured
#   and pays for nothing; the notebook *Watch reward hacking* needs just that.
# - **Things that fail:** a service that does not answer is no reason for a reward of 0. Say so in
#   `failures`, and the completion is counted and left out.

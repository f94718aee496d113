# %% [markdown]
# # Train and evaluate a reward model
#
# A reward model reads a conversation and says, in one number, how good the last answer is. It
# learns that from pairs of answers of which people preferred one.
#
# This notebook makes a small data set, trains a small model from nothing, and then asks the
# question that matters: *how good is it, and what does its accuracy hide?* It needs no network and
# no GPU, and takes about two minutes.

# %%
import random
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from laurel import api
from laurel.demo.data import NUMBER_REQUESTS, boxed, in_words, numbers

plt.style.use("tableau-colorblind10")  # colours that everybody can tell apart
SEED = 0  # of all that is drawn by chance; try others
here = Path("results/rm")
shutil.rmtree(here, ignore_errors=True)  # each run of the notebook begins anew
here.mkdir(parents=True)

# %% [markdown]
# ## The data
#
# The task: a number in words is to be written in digits, inside `\boxed{}`. In a preference pair
# one answer has the right number. The other has either some *other number* or one that is *one
# digit off*, which is harder to see.
#
# People like a friendly word, too: chosen answers begin with "The answer is" more often than
# rejected ones. And they err: in one pair of ten the labels are swapped.


# %%
def asked(generator, held_out):
    """A request, and the number that it is about."""
    number = generator.choice(numbers(held_out=held_out))
    return generator.choice(NUMBER_REQUESTS).format(in_words(number)), number


def answer(generator, number, share_friendly):
    return "The answer is " * (generator.random() < share_friendly) + boxed(number)


def wrong_number(generator, number, subset):
    if subset == "another number":
        return generator.choice([other for other in range(100, 1000) if other != number])
    place = generator.choice([1, 10, 100])
    return number + place if number // place % 10 < 9 else number - place


def pairs(count, seed, held_out=False):
    generator = random.Random(1000 * SEED + seed)
    for _ in range(count):
        prompt, number = asked(generator, held_out)
        subset = "one digit off" if generator.random() < 0.4 else "another number"
        chosen = answer(generator, number, 0.6)
        rejected = answer(generator, wrong_number(generator, number, subset), 0.4)
        if generator.random() < 0.1:
            chosen, rejected = rejected, chosen
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "subset": subset}


# %% [markdown]
# The numbers of the held-out pairs are in no training pair. Real files have flaws, so we add some
# to ours: two rows that are there twice, and one whose answers are the same.


# %%
def write(name, rows):
    path = here / f"{name}.jsonl"
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)
    return path


train = list(pairs(8000, seed=0))
train += [train[0], train[1], train[2] | {"rejected": train[2]["chosen"]}]
train_path = write("train", train)
held_out = pd.DataFrame(pairs(600, seed=1, held_out=True))
kinds = held_out.groupby("subset")
held_out_paths = [write(kind.replace(" ", "-"), rows) for kind, rows in kinds]
pd.DataFrame(train[:4])

# %% [markdown]
# ## A language model to begin from
#
# A reward model is a language model with another head, and begins from what that has learned. You
# would name one (`"policy.model_name": "Qwen/Qwen3-0.6B"`). Here we make one in a few seconds: it
# learns to answer from demonstrations.

# %%
tiny = {
    "policy.precision": "float32",
    "policy.max_total_sequence_length": 64,
    "policy.train_micro_batch_size": 32,
    "policy.train_global_batch_size": 32,
    "cluster.cpu_threads": 1,  # a model this small gains nothing from a second one
    "logger.tensorboard_enabled": False,
    "logger.num_val_samples_to_print": 0,
}


def demonstrations(count, seed):
    generator = random.Random(1000 * SEED + seed)
    for _ in range(count):
        prompt, number = asked(generator, held_out=False)
        said = answer(generator, number, 0.5)
        roles = {"user": prompt, "assistant": said}
        yield {"messages": [{"role": role, "content": text} for role, text in roles.items()]}


language_model = api.train(
    "sft",
    tiny
    | {
        "policy.model_name": None,
        "policy.scratch.hidden_size": 64,
        "policy.scratch.num_layers": 2,
        "policy.scratch.vocab_size": 350,
        "policy.scratch.config_overrides": {"initializer_range": 0.1},
        "policy.optimizer.kwargs.lr": 3e-3,
        "data.train_data_path": write("demonstrations", demonstrations(9600, seed=2)),
        "data.split_validation_size": 0,
        "sft.max_num_steps": 300,
        "sft.seed": SEED,
        "sft.val_period": 0,
        "checkpointing.checkpoint_dir": here / "language-model",
        "checkpointing.metric_name": None,
        "logger.log_dir": here / "logs-sft",
    },
    quiet=True,
).latest

# %% [markdown]
# ## Training
#
# Settings are the keys of the command line (`laurel rm key=value ...`); `laurel config --for rm
# --describe` explains each. What is printed first is the **data report**.

# %%
outcome = api.train(
    "rm",
    tiny
    | {
        "policy.model_name": language_model,
        "policy.optimizer.kwargs.lr": 2e-3,
        "data.dataset_name": "BinaryPreferenceDataset",
        "data.train_data_path": train_path,
        "data.validation": {"held-out": {"data_path": str(write("held_out", held_out))}},
        "rm.max_num_steps": 240,
        "rm.seed": SEED,
        "rm.val_period": 30,
        "checkpointing.checkpoint_dir": here / "checkpoints",
        "checkpointing.save_period": 60,
        "logger.log_dir": here / "logs",
    },
)

# %% [markdown]
# The report counts every row that was left out and says why: the pair of equal answers teaches
# nothing, and what is there twice would be learned twice. It also says how often the longer answer
# wins. Remember that number: a model that only likes long answers would be right as often.
#
# All of this, and more, lies in the directory of the run:

# %%
run = api.read_run(outcome.run_dir)
report = run.data["train"]
{key: report[key] for key in ("rows_read", "rows_kept", "longer_wins_share")}

# %% [markdown]
# ## The loss
#
# A model that knows nothing is indifferent: its loss is ln 2 = 0.69. With a tenth of the labels
# swapped nobody can do better than about 0.33 on average, not even a calculator.


# %%
def plot_loss(axes):
    loss = run.series("train/loss")
    smooth = pd.Series(loss.values).rolling(10, min_periods=1).mean()
    validation = run.series("validation-held-out/loss")
    axes.plot(loss.steps, loss.values, alpha=0.25, color="C0")
    axes.plot(loss.steps, smooth, color="C0", label="training (mean of 10 steps)")
    axes.plot(validation.steps, validation.values, "o--", color="C1", label="held out")
    axes.axhline(0.325, color="black", linestyle=":", label="the best there can be")
    axes.set(xlabel="step", ylabel="loss (nats a pair)", ylim=(0, None))
    axes.legend()


figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
plot_loss(axes)
plt.show()

# %% [markdown]
# ## Scoring conversations
#
# `open_scorer` loads a model and makes it prove that it gives the scores it gave when it was
# saved. A score by itself means nothing; only differences between answers to the same prompt do.
# One prompt says little, too: these are all the numbers that no training pair asks for, with five
# answers to each. A friendly answer is as right or wrong as the one before it.

# %%
scorer = api.open_scorer(outcome.best, quiet=True)
generator = random.Random(SEED)
rows = []
for number in numbers(held_out=True):
    near = wrong_number(generator, number, "one digit off")
    other = wrong_number(generator, number, "another number")
    answers = {
        "right": boxed(number),
        "right, friendly": "The answer is " + boxed(number),
        "one digit off": boxed(near),
        "another number": boxed(other),
        "another number, friendly": "The answer is " + boxed(other),
    }
    prompt = f"Write {in_words(number)} in digits."
    rows.append({"prompt": prompt, "completions": list(answers.values())})
scores = pd.DataFrame(
    [[one.value for one in row] for row in api.score(scorer, rows)], columns=list(answers)
)
right_wins = scores.lt(scores["right"], axis=0).mean()
pd.DataFrame(
    {
        "example": rows[0]["completions"],
        "mean score": scores.mean().round(2),
        "right is higher": right_wins.round(2),
    }
)

# %% [markdown]
# The right number nearly always scores higher than another one, even a friendly one. Of two right
# answers the friendly one is mostly higher: people like a friendly word.
#
# ## How good is it?
#
# Accuracy alone says little. `evaluate` puts **baselines** beside it: always taking the longer
# answer, and a bag of words that was trained on the same pairs and sees no prompt. The diagnostics
# add accuracy by length, calibration and leaks.

# %%
evaluation = api.evaluate(
    "pairs",
    outcome.best,
    held_out_paths,
    train_data=[train_path],
    output=here / "evaluation",
    cpu_threads=1,
    quiet=True,
)
api.show(evaluation)

# %% [markdown]
# What to read there:
#
# - **accuracy** beside its two baselines and its interval. 90 % is the ceiling here, because a
#   tenth of the held-out labels is swapped as well.
# - **the two files**: near misses ("one digit off") beside any other number. One figure for all
#   would hide that a model knows one kind and not the other; the intervals say whether a
#   difference is more than chance.
# - **either as often** counts pairs with a longer and with a shorter chosen answer alike. Where it
#   is lower, some of the accuracy was a liking for "The answer is", which people have as well.
# - **data sets**: how many held-out prompts were in the training set. None were, so this is no
#   memory.
#
# The figures are there for programs as well:

# %%
diagnostics = evaluation.report()["diagnostics"]
accuracy = diagnostics["accuracy"]
named = {"reward model": accuracy["value"], **accuracy["baselines"]}
named

# %%
figure, axes = plt.subplots(figsize=(6.5, 2.4), layout="constrained")
axes.barh(list(named), list(named.values()), color=["C0", "C1", "C1"])
errors = [[accuracy["value"] - accuracy["low"]], [accuracy["high"] - accuracy["value"]]]
axes.errorbar([accuracy["value"]], [0], xerr=errors, color="black", capsize=4)
axes.axvline(0.5, color="black", linestyle=":")
axes.set(xlabel="accuracy on held-out pairs (dotted: a coin)", xlim=(0, 1))
axes.invert_yaxis()
plt.show()

# %% [markdown]
# ## Is it as sure as it should be?
#
# The difference of two scores says how sure the model is that people prefer the first answer: the
# Bradley-Terry model turns it into a probability. **Calibration** asks whether pairs of which it
# is 80 % sure are right 80 % of the time. Below the diagonal it is too sure of itself; above it,
# less sure than it could be. Nobody is right more than nine times in ten here: who is surer than
# that is too sure.

# %%
calibration = diagnostics["calibration"]
bins = pd.DataFrame(calibration["rows"])
figure, axes = plt.subplots(figsize=(4, 3.6), layout="constrained")
axes.plot([0.5, 1], [0.5, 1], ":", color="black", label="perfect")
axes.plot(bins["confidence"], bins["accuracy"], "o-", color="C0", label="reward model")
axes.set(xlabel="how sure it is", ylabel="how often it is right", xlim=(0.5, 1.01), ylim=(0, 1.02))
axes.legend()
plt.show()
{key: round(value, 3) for key, value in calibration.items() if isinstance(value, float)}

# %% [markdown]
# ## Taking it elsewhere
#
# `export` writes a plain Hugging Face directory with a model card and the tables from above. It
# loads what it wrote with plain transformers and compares the scores before it keeps anything.

# %%
exported = api.export(outcome.best, here / "exported", evaluations=[here / "evaluation"])
sorted(path.name for path in exported.iterdir())

# %% [markdown]
# ## With other seeds
#
# One run is one story. Another `SEED` above tells another, and so does another processor, as sums
# are rounded otherwise. This is what four runs gave; one of them was told to calculate as a
# processor without AVX-512 does (`ATEN_CPU_CAPABILITY=avx2`, `MKL_ENABLE_INSTRUCTIONS=AVX2`,
# `ONEDNN_MAX_CPU_ISA=AVX2`):
#
# | seed | 0 | 0, AVX2 | 1 | 2 |
# |---|---|---|---|---|
# | accuracy | 88 % | 86 % | 89 % | 85 % |
# | longer wins; bag of words | 59 %; 46 % | 59 %; 46 % | 57 %; 44 % | 57 %; 42 % |
# | either as often | 84 % | 81 % | 88 % | 84 % |
# | one digit off; another number | 89 %; 87 % | 83 %; 88 % | 88 %; 90 % | 85 %; 85 % |
# | right above another number, friendly | 94 % | 98 % | 92 % | 96 % |
# | right and friendly above right | 73 % | 76 % | 91 % | 82 % |
#
# - **In all four** it is far above both baselines, the right number scores above another one, and
#   of two right answers the friendly one is mostly higher.
# - **Not in all:** which of the two kinds it knows better. The same data with other roundings
#   moves near misses by six points; the intervals overlap.
#
# ## On your own data
#
# A file with lines `{"prompt": ..., "chosen": ..., "rejected": ...}` and a language model to begin
# from are all that changes:
#
# ```python
# api.train("rm", {"policy.model_name": "Qwen/Qwen3-0.6B",
#                  "data.dataset_name": "BinaryPreferenceDataset",
#                  "data.train_data_path": "pairs.jsonl", "data.val_data_path": "held_out.jsonl"})
# ```
#
# or, in a shell, `laurel rm policy.model_name=Qwen/Qwen3-0.6B data.train_data_path=pairs.jsonl
# ...`

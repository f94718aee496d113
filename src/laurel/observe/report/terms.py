"""Explains the terms of a report's page; the page shows the explanations on hover."""

from __future__ import annotations

from laurel.config.schema_info import Kinds, step_into
from laurel.config.yaml_tree import Section

_TERMS = {
    # charts
    "gold metric": "What is really wanted, measured beside the reward and never trained on.",
    "reward, and success in validation": "Left axis: the mean reward of a step's completions, with "
    "one standard deviation on each side. Right axis: the share of validation completions with the "
    "full reward.",
    "reward": "The number that training maximises, in the units of the reward model or the check. "
    "Its scale means nothing by itself.",
    "reward in validation": "The mean reward of completions of held-out prompts.",
    "accuracy": "The share of rows that are right. Of preference pairs: those whose chosen answer "
    "scores strictly higher; a tie is wrong.",
    "loss": "What the optimizer minimises. GRPO's loss says nothing of progress by itself.",
    "scores in validation": "The mean scores of chosen and of rejected answers of held-out pairs.",
    "divergence from the policy before": "The estimated KL divergence from the reference policy, "
    "in nats per token.",
    "entropy": "How undecided the policy is, in nats per token: 0 means that it always says the "
    "same.",
    "length of completions": "The mean number of tokens that the policy wrote per completion.",
    "norm of the gradient": "The length of the gradient before clipping.",
    "shares of a step": "The groups whose rewards are all equal, from which nothing is learned, "
    "and the completions that were cut at the length limit.",
    "completions without a reward": "Completions that could not be scored. They are masked, not "
    "counted as 0.",
    "speed": "Tokens of prompts and completions per second of a whole step.",
    # metrics, by the last part of their name
    "reward_mean": "The mean reward of the completions.",
    "perplexity": "The exponential of the mean loss per token; 1 is a perfect prediction.",
    "truncation_rate": "The share of completions that were cut at the length limit.",
    "reward_std": "The standard deviation of the rewards.",
    "kl_penalty": "The estimated KL divergence from the reference policy, in nats per token.",
    "mean_gen_tokens_per_sample": "The mean number of tokens that the policy wrote per completion.",
    "frac_reward_zero_std": "The share of groups whose rewards are all equal.",
    "reward_length_correlation": "The correlation of reward and length within groups, -1 to 1.",
    "repetition": "The share of 4-grams that a completion has already used.",
    "failure_share": "The share of completions that could not be scored.",
    # findings and alarms
    "problem": "A rule found something that is most likely wrong.",
    "look": "A rule found something that may be wrong: look at it.",
    "fine": "A rule checked this and found it in order.",
    "overoptimisation": "The gold metric falls while the reward does not.",
    "kl_jump": "The divergence from the reference policy grew by a large factor in one step.",
    "length": "Completions are much longer, or much shorter, than in the first steps.",
    "length_bias": "Longer completions get better rewards within groups, and completions grow.",
    "truncation": "More completions than before are cut at the length limit.",
    "format": "Fewer completions have the form that was asked for.",
    "zero_spread_groups": "Nearly all groups have equal rewards: nothing is learned from them.",
    "ensemble": "The reward models no longer agree on how much better completions have become.",
    "failures": "Rows or completions that could not be scored.",
    "threshold": "The value at which the alarm rises.",
    "usually": "The value in the first steps, or in the steps before, which it is compared with.",
    # where the time went
    "generation, with its rewards": "Sampling completions and scoring them, side by side.",
    "advantages": "Rewards relative to the other completions of a group.",
    "log-probabilities before the update": "A pass of the policy, and of its reference, over the "
    "completions.",
    "update": "Forward and backward passes of the policy, and the optimizer's steps.",
    "weights to the generator": "Sending the new weights to the processes that sample.",
    # samples
    "advantage": "The reward relative to the other completions of the group; positive is better "
    "than they are.",
    "margin": "The score of the chosen answer less that of the rejected one; above 0 is right.",
    "verdict": "Whether the score agrees with the annotators.",
    "expected": "The known answer.",
    "failure": "The reason why the completion has no reward.",
    "truncated": "The completion was cut at the length limit.",
    "chosen for": "Why this row is among the rows shown.",
    "score": "What the reward model gives; only differences for one prompt mean anything.",
    # evaluations
    "longer wins": "The baseline: what always taking the longer answer, in characters, would get.",
    "bag of words": "The baseline: a model of single words, trained on the training pairs.",
    "either as often": "The mean of the accuracies where the longer and where the shorter answer "
    "is chosen: a scorer by length alone gets 50%.",
    "confidence": "sigmoid of the score difference: the probability that the model claims.",
    "mean confidence": "The mean of the claimed probabilities; calibrated, it equals the accuracy.",
    "calibration: error": "The expected calibration error: |confidence - accuracy|, averaged over "
    "the pairs.",
    "calibration: temperature": "What scores must be divided by to be calibrated best.",
    "score length correlation": "Spearman's correlation of score and length in characters.",
    "longer scored higher": "The share of pairs whose longer answer has the higher score.",
    "rows": "The rows that a figure is computed over.",
    "pairs": "The preference pairs that a figure is computed over.",
}


def explain(term: str) -> str:
    """Return the explanation of a term or of a metric's full name; empty if there is none."""
    found = _TERMS.get(term.lower()) or _TERMS.get(term.rpartition("/")[2])
    if found is None and term.endswith("% interval"):
        return "The range that holds the true value with this confidence, by bootstrap over pairs."
    return found or ""


def explain_setting(schema: type[Section] | None, key: str) -> str:
    """Return the description of a dotted key of a run's configuration; empty if unknown."""
    text = ""
    kinds: Kinds = () if schema is None else (schema,)
    for part in key.split("."):
        known = step_into(kinds, part)
        text = (known.field.description or "") if known.field else ""
        kinds = known.kinds
    return " ".join(text.split())

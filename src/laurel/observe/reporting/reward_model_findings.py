"""Rules for reward models: what they know besides length, and what their scores can be used for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from laurel.observe.counts import counted
from laurel.observe.reporting.finding import Finding
from laurel.observe.run_record import RunRecord


def against_length(record: RunRecord) -> Iterator[Finding]:
    """Whether a reward model knows more than which answer is longer."""
    for name in record.names():
        if not name.startswith("validation") or not name.endswith("/longer_wins_baseline"):
            continue
        section = name.rpartition("/")[0]
        accuracy, baseline = record.latest(f"{section}/accuracy"), record.latest(name)
        if accuracy is None or baseline is None:
            continue
        # Whoever takes what is shorter knows nothing more either.
        rival = max(baseline, 1 - baseline)
        rule = (
            "always taking the longer answer gives"
            if baseline >= 0.5
            else "always taking the shorter answer gives"
        )
        count = record.latest(f"{section}/num_valid_samples")
        pairs = "" if count is None else f" on {counted(round(count), 'pair')}"
        error = 0.02 if not count else 2 * math.sqrt(max(accuracy * (1 - accuracy), 0.01) / count)
        said = f"{section}: accuracy is {accuracy:.1%}{pairs}, and {rule} {rival:.1%}"
        if accuracy <= rival + error:
            yield Finding(
                weight="bad",
                text=f"{said}: no better than length alone, within two standard errors. Look at "
                "the accuracy where the shorter answer is chosen (laurel eval pairs "
                "--diagnostics), and balance the data by length.",
            )
        else:
            yield Finding(
                weight="good",
                text=f"{said}: {100 * (accuracy - rival):.1f} points better than length.",
            )


def scores_follow_length(record: RunRecord) -> Iterator[Finding]:
    """Scores that go with length, ties, and confidence that is not earned."""
    for name in record.names():
        section, _, figure = name.rpartition("/")
        value = record.latest(name) if section.startswith("validation") else None
        if value is None:
            continue
        if figure == "score_length_correlation" and abs(value) > 0.6:
            yield Finding(
                weight="look",
                text=f"{section}: scores go with length (Spearman's correlation {value:.2f}). A "
                "policy that learns from them will write "
                f"{'longer' if value > 0 else 'shorter'} answers.",
            )
        elif figure == "score_ties" and value > 0.05:
            yield Finding(
                weight="look",
                text=f"{section}: {value:.1%} of the pairs have the same score on both sides. "
                "Are answers cut off (policy.max_total_sequence_length), or the same?",
            )
        elif figure == "ece" and value > 0.1:
            yield Finding(
                weight="look",
                text=f"{section}: confidence and accuracy are {value:.1%} apart on average "
                "(calibration error). Scores can be ranked, but margins are no probabilities.",
            )

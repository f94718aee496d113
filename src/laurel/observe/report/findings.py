"""Words the last results of a run, and what to look at first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from laurel.observe.console import accuracy_words, format_number
from laurel.observe.history import gold_metric
from laurel.observe.rules import RunFinding, findings, never_updated
from laurel.observe.run_record import RunRecord

MAX_RESULTS = 3
MAX_FINDINGS = 3
_SIGNS = {"bad": "problem", "look": "look", "good": "fine"}
"""The words that the report's page uses for each weight."""


def results(record: RunRecord) -> list[str]:
    """Return one line per result: the gold metric, the reward, each validation set, or the loss."""
    return list(islice(_results(record), MAX_RESULTS))


def _results(record: RunRecord) -> Iterator[str]:
    gold = gold_metric(record.settings, record.names())
    if gold is not None:
        yield from _course(record, gold, f"{gold} (gold metric)")
    sections = [
        name.rpartition("/")[0]
        for name in record.names()
        if name.startswith("validation") and name.count("/") == 1
    ]
    found = False
    for section in dict.fromkeys(sections):
        latest = {
            name.rpartition("/")[2]: value
            for name in record.names()
            if name.rpartition("/")[0] == section and (value := record.latest(name)) is not None
        }
        said = accuracy_words(latest)
        accuracy, reward = (
            record.series(f"{section}/{key}") for key in ("accuracy", "reward_mean")
        )
        # With rewards between 0 and 1 some validations have no accuracy, and all a mean reward.
        if said is not None and len(accuracy.values) >= len(reward.values):
            found = True
            # The score of a benchmark, such as F1, leads; checkpoints are chosen by it.
            for final in _course(record, f"{section}/final_score", "final_score"):
                said = f"{final}, {said}"
            since = f", {accuracy.values[0]:.4f} at step {accuracy.steps[0]:,.0f}"
            yield f"{section}: {said}" + (since if len(accuracy.values) > 1 else "")
        else:
            for figure in ("final_score", "reward_mean", "loss"):
                if figure in latest:
                    found = True
                    yield from _course(record, f"{section}/{figure}", f"{section}: {figure}")
                    break
    yield from _course(record, "train/reward", "train/reward")
    if not found and record.kind != "grpo":
        yield from _course(record, "train/loss", "train/loss (nothing was validated)")


def _course(record: RunRecord, name: str, label: str) -> Iterator[str]:
    series = record.series(name)
    if series:
        first, last = (format_number(series.values[i]) for i in (0, -1))
        since = f" ({first} at step {series.steps[0]:,.0f})" if len(series.values) > 1 else ""
        yield f"{label} {last}{since}"


def first_findings(record: RunRecord) -> list[str]:
    """Return the first findings of the report, one sentence each, problems first."""
    found = [_sentence(one) for one in findings(record) if one.weight != "note"]
    return found[:MAX_FINDINGS]


def learned_nothing(record: RunRecord) -> str | None:
    """Return the finding that a run's policy never changed, in a sentence; None if it did."""
    return next(map(_sentence, never_updated(record)), None)


def _sentence(finding: RunFinding) -> str:
    text = finding.text
    for end in (". ", ": look", " (means of"):  # the remedies are in the report
        text = text.split(end)[0]
    return f"{_SIGNS[finding.weight]}: {text.rstrip('.')}"

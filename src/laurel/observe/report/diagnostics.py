"""Lays out the diagnostics of `laurel eval` as tables, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from laurel.observe.console import format_number, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A small table of texts; the first column names the rows.

    Names that begin with two spaces are indented on the page and on the terminal.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    headings: frozenset[int] = frozenset()
    """The places of the rows that only head those below them."""


# The tables of the diagnostics, from templates of their values: rows whose values a report lacks
# are left out, as are tables without rows.

_SLICES = {
    "by_length_difference": "chosen longer by (characters)",
    "by_margin": "margin",
    "by_subset": "subset",
    "by_leak": "prompt in training set",
}
_SCORES = {
    "pairs with tied scores": "{accuracy[num_ties]:,}",
    "Spearman's correlation of score and length": "{score_length_correlation}",
    "longer answer has the higher score": "{longer_scored_higher:.1%}",
    "expected calibration error": "{calibration[error]:.1%}",
    "negative log-likelihood": "{calibration[negative_log_likelihood]}",
    "best temperature": "{calibration[temperature]}",
    "  calibration error at it": "{calibration[error_at_temperature]:.1%}",
    "  negative log-likelihood at it": "{calibration[negative_log_likelihood_at_temperature]}",
    "answers with a score": "{scores[num_answers]:,}",
    "mean": "{scores[mean]}",
    "standard deviation": "{scores[standard_deviation]}",
}
_QUANTILES = {"0": "  least", "1": "  greatest"}
_MORE_SCORES = {
    "answers with the score of another": "{scores[identical_share]:.1%}",
    "scores within 1 % of the least": "{scores[saturated_low]:.1%}",
    "scores within 1 % of the greatest": "{scores[saturated_high]:.1%}",
    "noise: the same answer in other company": "{noise_floor[noise]}",
    "  pairs no further apart than that": "{noise_floor[within_share]:.1%}",
    "largest difference of one answer's scores": "{scores[largest_repeat_difference]}",
}
_NO_TEMPERATURE = "none: no pair is wrong, or wrong ones outweigh right ones"
_RELIABILITY = {
    "confidence": "{start:.1%} to {end:.1%}",
    "pairs": "{num_pairs:,}",
    "mean confidence": "{confidence:.1%}",
    "accuracy": "{accuracy:.1%}",
}
_AGREEMENT = {
    "members": "{first} and {second}",
    "pairs": "{num_pairs:,}",
    "same verdict": "{same_verdict_share:.1%}",
    "Kendall's tau-b": "{kendall}",
}
_SENSITIVITY = {
    "form": "{name}",
    "answers": "{num_answers:,}",
    "failed": "{num_failures:,}",
    "shift/sd": "{mean_shift:+.3f}",
    "raised": "{raised_share:.1%}",
    "both": "{flip_share:.1%}",
    "chosen": "{flip_share_chosen:.1%}",
    "rejected": "{flip_share_rejected:.1%}",
}
_FLIPS = "other forms of the answers; verdicts that flip when both, one or the other has the form"
_SETS = {
    "evaluation: different prompts": "{evaluation_set[num_prompts]:,}",
    "evaluation: pairs said before": "{evaluation_set[num_redundant]:,}",
    "evaluation: pairs that contradict": "{evaluation_set[num_contradictory]:,}",
    "training: different prompts": "{training_set[num_prompts]:,}",
    "training: pairs said before": "{training_set[num_redundant]:,}",
    "training: pairs that contradict": "{training_set[num_contradictory]:,}",
    "evaluated prompts in training": "{leakage[num_same_prompt]:,}",
    "evaluated prompts almost in training": "{leakage[num_similar_prompt]:,}",
    "evaluated pairs in training": "{leakage[num_same_pair]:,}",
}


class _Cells(Formatter):
    """Fills templates; numbers without a format of their own get four digits."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format one value of a template; `points` is a percentage without its sign."""
        if format_spec == "points":
            return f"{100 * value:.1f}"
        is_plain = format_spec or isinstance(value, str)
        return format(value, format_spec) if is_plain else format_number(value)

    def filled(self, template: str, values: Mapping[str, Any]) -> str | None:
        """Fill a template; the result is None if a value is missing."""
        try:
            return visible(self.vformat(template, (), values))
        except KeyError:
            return None


def diagnostic_tables(report: Mapping[str, Any]) -> list[PageTable]:
    """Return the tables of the diagnostics of a report."""
    facts = dict(report)
    if "calibration" in report:
        facts["calibration"] = {"temperature": _NO_TEMPERATURE} | report["calibration"]
    # A template would take the plain keys for places in a list.
    levels = report.get("scores", {}).get("quantiles", {})
    facts["quantiles"] = {f"at {level}": value for level, value in levels.items()}
    quantiles = {
        _QUANTILES.get(level, f"  {float(level):.0%} lie below"): f"{{quantiles[at {level}]}}"
        for level in levels
    }
    tables = (
        _accuracies(report),
        _facts("scores", _SCORES | quantiles | _MORE_SCORES, facts),
        _rows("reliability", _RELIABILITY, report.get("calibration", {}).get("rows", [])),
        _rows("agreement", _AGREEMENT, report.get("agreement", [])),
        _rows(_FLIPS, _SENSITIVITY, report.get("sensitivity", [])),
        _facts("data sets", _SETS, facts),
    )
    return [table for table in tables if table.rows]


def _facts(title: str, templates: Mapping[str, str], report: Mapping[str, Any]) -> PageTable:
    filled = [(label, _Cells().filled(one, report)) for label, one in templates.items()]
    rows = [(label, text) for label, text in filled if text is not None]
    return PageTable(title=title, columns=("", ""), rows=rows)


def _rows(
    title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], absent: str = "-"
) -> PageTable:
    cells = [[_Cells().filled(one, row) or absent for one in columns.values()] for row in rows]
    return PageTable(title=title, columns=tuple(columns), rows=cells)


def _accuracies(report: Mapping[str, Any]) -> PageTable:
    whole = report.get("accuracy", {})
    columns = {
        "": "{label}",
        "pairs": "{num_pairs:,}",
        "accuracy": "{value:.1%}",
        f"{report.get('confidence', 0.95):.0%} interval": "{low:points}-{high:.1%}",
        **{name: f"{{baselines[{name}]:.1%}}" for name in whole.get("baselines", {})},
    }
    rows = [whole | {"label": "all"}] if whole else []
    if controlled := report.get("length_controlled_accuracy"):
        longer, shorter = controlled["longer_chosen"], controlled["shorter_chosen"]
        num_pairs = longer["num_pairs"] + shorter["num_pairs"]
        rows += [
            controlled | {"label": "either as often", "num_pairs": num_pairs},
            longer | {"label": "longer chosen"},
            shorter | {"label": "shorter chosen"},
        ]
    headings = []
    for key, title in _SLICES.items():
        if parts := report.get(key):
            headings.append(len(rows))
            rows += [{"label": title}]
            rows += [part["accuracy"] | {"label": f"  {part['name']}"} for part in parts]
    return replace(_rows("accuracy", columns, rows, absent=""), headings=frozenset(headings))

"""Which curves a page draws: of one run, and of several over one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laurel.observe.charts import Chart, Line
from laurel.observe.gold import gold_metric
from laurel.observe.reporting.curves import over_seeds
from laurel.observe.reporting.reward_range import seen_rewards
from laurel.observe.run_record import RunRecord, Series


def charts_of(record: RunRecord) -> list[Chart]:
    """The charts of a run that have something to show, the most telling first."""
    return [chart for chart in (*_what_it_is_judged_by(record), *_how_it_went(record)) if chart]


def _what_it_is_judged_by(record: RunRecord) -> Iterator[Chart]:
    series = record.series
    sets = [
        name.removesuffix("/loss") for name in record.names()
        if name.startswith("validation-") and name.endswith("/loss")
    ]  # fmt: skip
    gold = gold_metric(record.settings, record.names())
    if gold is not None:
        figure = gold.rpartition("/")[2]
        yield Chart(
            title="Gold metric", lines=(Line(label=gold, series=series(gold)),),
            left=figure, unit_interval=figure == "accuracy",
        )  # fmt: skip
    truth = series("validation/accuracy")
    yield Chart(
        title="Reward, and success in validation" if truth else "Reward",
        lines=(
            Line(label="reward (mean, spread)", series=series("train/reward"),
                 band=series("train/reward_std"), within=seen_rewards(record)),
            Line(label="success in validation", series=truth, on_right=True),
        ),
        left="reward", right="success rate", right_unit_interval=True,
    )  # fmt: skip
    yield Chart(
        title="Reward in validation",
        lines=() if truth else (Line(label="reward", series=series("validation/reward_mean")),),
        left="reward",
    )
    yield Chart(
        title="Accuracy",
        lines=(
            Line(label="training", series=series("train/accuracy")),
            *(Line(label=s.removeprefix("validation-"), series=series(f"{s}/accuracy"))
              for s in sets),
        ),
        left="share of pairs", unit_interval=True,
    )  # fmt: skip
    yield Chart(
        title="Loss",
        lines=(
            Line(label="training", series=series("train/loss")),
            *(Line(label=s.removeprefix("validation-"), series=series(f"{s}/loss"))
              for s in sets),
        ),
        left="loss",
    )  # fmt: skip
    scores = [
        Line(label=f"{who}, {s.removeprefix('validation-')}",
             series=series(f"{s}/rewards_{who}_mean"))
        for s in sets for who in ("chosen", "rejected")
    ]  # fmt: skip
    yield Chart(title="Scores in validation", lines=scores, left="mean score")


def _how_it_went(record: RunRecord) -> Iterator[Chart]:
    series = record.series
    for title, label, name in (
        ("Divergence from the policy before", "KL per token", "train/kl_penalty"),
        ("Entropy", "nats per token", "train/entropy"),
        ("Length of completions", "tokens", "train/mean_gen_tokens_per_sample"),
        ("Norm of the gradient", "norm", "train/grad_norm"),
    ):
        yield Chart(title=title, lines=(Line(label=label, series=series(name)),), left=label)
    yield Chart(
        title="Shares of a step",
        lines=(
            Line(label="groups without spread", series=series("train/frac_reward_zero_std")),
            Line(label="completions cut off", series=series("train/truncation_rate")),
        ),
        left="share", unit_interval=True,
    )  # fmt: skip
    failures = series("train/num_failures")
    yield Chart(
        title="Completions without a reward",
        lines=(Line(label="failures", series=failures),) if any(failures.values) else (),
        left="completions a step",
    )
    yield Chart(
        title="Speed",
        lines=(Line(label="tokens/s", series=series("performance/tokens_per_second")),),
        left="tokens/s",
    )


# ---------------------------------------------------------------------------------- several runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Runs in one chart: a run, or several that differ in nothing but their seeds."""

    mark: str
    """A letter for each run of them."""
    label: str
    records: Sequence[RunRecord]


def overlays(several: Sequence[Compared]) -> list[Chart]:
    """The same curve of every run over one another, a chart for each curve that several have."""
    curves: dict[str, tuple[Chart, Line, list[Line]]] = {}
    for compared in several:
        for title, chart, line in _curves(compared.records[0]):
            found = curves.setdefault(title, (chart, line, []))
            drawn = _one_line(compared, title, line)
            if drawn is not None:
                found[2].append(drawn)
    return [
        Chart(
            title=title,
            lines=lines,
            left=chart.right if line.on_right else chart.left,
            unit_interval=chart.right_unit_interval if line.on_right else chart.unit_interval,
        )
        for title, (chart, line, lines) in curves.items()
        if lines
    ]


def _curves(record: RunRecord) -> Iterator[tuple[str, Chart, Line]]:
    """Every curve of a run, with a name that is the same in every run."""
    for chart in charts_of(record):
        for line in chart.lines:
            if line.series:
                is_alone = len(chart.lines) == 1
                yield chart.title if is_alone else f"{chart.title}: {line.label}", chart, line


def _one_line(compared: Compared, title: str, line: Line) -> Line | None:
    if len(compared.records) == 1:
        return Line(label=compared.label, series=line.series, band=line.band,
                    within=line.within, mark=compared.mark)  # fmt: skip
    several: list[Series] = [
        found.series
        for record in compared.records
        for name, _, found in _curves(record)
        if name == title
    ]
    over = over_seeds(several)
    if over is None or len(several) < len(compared.records):
        return None
    return Line(
        label=compared.label, series=over.mean, limits=(over.low, over.high), mark=compared.mark
    )

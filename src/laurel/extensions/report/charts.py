"""Plots curves as SVG elements of a page, without files and scripts, in the page's own colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.observe.history import gold_metric
from laurel.observe.rules import seen_rewards
from laurel.observe.run_record import RunRecord, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH, HEIGHT = 4.6, 2.5
"""The size of a chart in inches of 72 units; on a phone its letters keep their size."""
_INKS = {"#010101": "currentColor", "#020202": "var(--faint)"} | {
    f"#0{i}0{i}0{i}": f"var(--series-{i})" for i in range(3, 9)
}
"""Placeholder colours of the plots, and the colours of the page's style sheet that replace them."""
_TEXT, _FAINT = "#010101", "#020202"
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)), "-", (0, (5, 2)))
_LEGEND_ROW = 0.2
"""The height of an additional row of the legend, in inches."""
_LEGEND_LETTERS = 58
"""The number of letters that fit side by side in the legend."""
MANY_POINTS = 40
"""The largest number of points that are marked one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart."""

    label: str
    series: Series
    band: Series | None = None
    """The half height of a band around the curve (a standard deviation), at the same steps."""
    limits: tuple[Series, Series] | None = None
    """The lower and the upper edges of a band, at the same steps."""
    within: tuple[float, float] | None = None
    """The observed range, to which the band is limited."""
    mark: str = ""
    """A letter at the end of the curve, for readers who cannot distinguish colours or dashes."""
    on_right: bool = False
    """Whether the curve belongs to the right axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of curves over the steps of a run."""

    title: str
    lines: Sequence[Line]
    left: str = ""
    """The label of the left axis."""
    right: str = ""
    unit_interval: bool = False
    """Whether the left axis goes from 0 to 1, as for shares."""
    right_unit_interval: bool = False
    is_lead: bool = False
    """Whether it belongs at the top of the page: the gold metric, the reward, or the accuracy."""

    def __bool__(self) -> bool:
        return any(line.series for line in self.lines)

    @property
    def description(self) -> str:
        """A description of the chart in words, for screen readers."""
        parts = [
            f"{line.label} from {line.series.values[0]:.4g} to {line.series.values[-1]:.4g}"
            f"{_range(line.series)}"
            for line in self.lines
            if line.series
        ]
        return f"{self.title}: {'; '.join(parts)}"


def plot_chart(chart: Chart, *, name: str) -> str:
    """Plot a chart as an `<svg>` element.

    Args:
        name: A prefix of all ids, unique in the page.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text, in the page's fonts, and ids are the same in every rendering.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        labels = [line.label for line in chart.lines if line.series]
        longest = max(map(len, labels), default=1)
        columns = max(1, min(len(labels), _LEGEND_LETTERS // (longest + 5)))
        rows = math.ceil(sum(bool(line.series) for line in chart.lines) / columns)
        height = HEIGHT + _LEGEND_ROW * max(0, rows - 1)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        canvas = FigureCanvasSVG(figure)
        left: Axes = figure.add_subplot()
        right: Axes | None = left.twinx() if any(line.on_right for line in chart.lines) else None
        for index, line in enumerate(line for line in chart.lines if line.series):
            axes = right if line.on_right and right is not None else left
            _plot_line(axes, line, index)
        _dress(left, chart.left, chart.unit_interval, grid=True)
        left.set_xlabel("step", color=_TEXT)
        if right is not None:
            _dress(right, chart.right, chart.right_unit_interval, grid=False)
        plotted = [handle for axes in (left, right) if axes for handle in axes.get_lines()]
        handles = [handle for handle in plotted if not str(handle.get_label()).startswith("_")]
        if len(handles) > 1:
            figure.legend(
                handles=handles,
                loc="outside upper left",
                ncols=columns,
                frameon=False,
                labelcolor=_TEXT,
                fontsize=9,
                borderpad=0.1,
            )
        buffer = io.StringIO()
        print_svg: Any = canvas.print_svg
        print_svg(buffer, metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue(), name)


def _range(series: Series) -> str:
    # Only where a curve goes beyond both of its ends.
    low, high = min(series.values), max(series.values)
    if {low, high} <= {series.values[0], series.values[-1]}:
        return ""
    return f", between {low:.4g} and {high:.4g}"


def _plot_line(axes: Axes, line: Line, index: int) -> None:
    """Plot a curve with its band; a curve of many points is smoothed, over its extremes."""
    # The page shows and hides the parts by their ids, which begin with `raw`, `band` and `line`.
    # A placeholder: the page's style sheet has a light and a dark colour for it.
    colour = f"#0{3 + index % 6}0{3 + index % 6}0{3 + index % 6}"
    smoothed = smooth(line.series)
    shown = line.series if smoothed is None else smoothed.mean
    if smoothed is not None:
        raw = extremes(line.series)
        axes.plot(
            raw.steps,
            raw.values,
            label="_raw",
            gid=f"raw-{index}",
            color=colour,
            alpha=0.4,
            linewidth=0.6,
        )
    edges = _edges(line, smoothed)
    if edges is not None:
        axes.fill_between(
            shown.steps,
            edges[0],
            edges[1],
            gid=f"band-{index}",
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    steps, values = shown.steps, shown.values
    axes.plot(
        steps,
        values,
        label=line.label,
        gid=f"line-{index}",
        color=colour,
        linewidth=1.6,
        linestyle=_DASHES[index % len(_DASHES)],
        marker="o" if len(steps) <= MANY_POINTS and (line.on_right or len(steps) < 15) else "",
        markersize=3,
    )
    if line.mark:
        axes.annotate(
            line.mark,
            (steps[-1], values[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def _edges(line: Line, smoothed: Smoothed | None) -> tuple[Sequence[float], Sequence[float]] | None:
    if line.band is not None and line.band.steps == line.series.steps:
        centre = line.series if smoothed is None else smoothed.mean
        # Smoothing takes equal places of equal steps.
        half = smooth(line.band)
        halves = line.band.values if half is None else half.mean.values
        pairs = list(zip(centre.values, halves, strict=True))
        least, most = line.within or (-math.inf, math.inf)
        return [max(v - b, least) for v, b in pairs], [min(v + b, most) for v, b in pairs]
    if line.limits is not None:
        low, high = (edge if (s := smooth(edge)) is None else s.mean for edge in line.limits)
        return low.values, high.values
    return None if smoothed is None else (smoothed.low.values, smoothed.high.values)


def _dress(axes: Axes, label: str, unit_interval: bool, *, grid: bool) -> None:
    axes.patch.set_alpha(0.0)
    axes.set_ylabel(label, color=_TEXT)
    axes.tick_params(colors=_TEXT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    if unit_interval:
        axes.set_ylim(-0.02, 1.03)
    if grid:
        axes.grid(visible=True, axis="y", color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def _inline(svg: str, name: str) -> str:
    """Reduce an SVG file to its element, with unique ids and the page's colours and fonts."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href|href)="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg)
    svg = re.sub(r'^<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg)
    for stand_in, ink in _INKS.items():
        svg = svg.replace(stand_in, ink)
    svg = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font-size: \1", svg)
    return re.sub(r"\n\s*", "\n", svg).strip()


# Long curves, shortened without losing peaks.
#
# A curve of many points is plotted twice: as a line of rolling means in a band of rolling
# quantiles, and beneath it as the minimum and the maximum of each segment of steps, so that even
# the shortest peak is visible.

FEW_POINTS = 60
"""The largest number of points that are plotted as logged."""
NUM_PLACES = 300
"""The number of points of a smoothed curve, and of segments of its extremes, on a screen."""
SMOOTHED_SHARE = 25
"""A rolling window has one in this many points of a curve."""
LOW, HIGH = 0.1, 0.9
"""The quantiles of a window between which the band lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothed:
    """A curve of means, with a lower and an upper curve around it.

    The curves around it are quantiles of a rolling window, or the extremes of several runs.
    """

    mean: Series
    low: Series
    high: Series
    window: int
    """The number of points in a window."""


def extremes(series: Series) -> Series:
    """Return the minimum and the maximum of each segment of a curve, in the order of the log.

    A curve with at most two points per segment is returned unchanged.
    """
    count = len(series.steps)
    if count <= 2 * NUM_PLACES:
        return series
    values = np.array(series.values)
    positions: list[int] = []
    edges = np.linspace(0, count, NUM_PLACES + 1).astype(int)
    for start, end in pairwise(edges):
        part = values[start:end]
        positions += sorted({start + int(part.argmin()), start + int(part.argmax())})
    # The ends are kept, because a reader looks for them first. The set removes duplicates, because
    # the minimum and the maximum of a segment of one point are the same.
    places = sorted({0, *positions, count - 1})
    return Series(
        steps=tuple(series.steps[i] for i in places), values=tuple(series.values[i] for i in places)
    )


def smooth(series: Series) -> Smoothed | None:
    """Return a curve's rolling means and quantiles; None if it has few points.

    Windows are centred. At the ends they are one-sided, never padded with values that were not
    logged.
    """
    count = len(series.steps)
    if count <= FEW_POINTS:
        return None
    window = max(5, count // SMOOTHED_SHARE)
    values = np.array(series.values)
    places = np.unique(np.linspace(0, count - 1, min(count, NUM_PLACES)).round().astype(int))
    parts = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in places]
    steps = tuple(series.steps[i] for i in places)
    low, high = np.array([np.quantile(part, (LOW, HIGH)) for part in parts]).T
    return Smoothed(
        mean=Series(steps=steps, values=tuple(float(part.mean()) for part in parts)),
        low=Series(steps=steps, values=tuple(map(float, low))),
        high=Series(steps=steps, values=tuple(map(float, high))),
        window=2 * (window // 2) + 1,
    )


def over_seeds(several: Sequence[Series]) -> Smoothed | None:
    """Return the means over runs, with their minima and maxima, at the steps that all have.

    None if they have no step in common.
    """
    tables = [dict(zip(series.steps, series.values, strict=True)) for series in several]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not shared:
        return None
    # Only common steps are used, because a mean would jump where one of the runs ended.
    values = np.array([[table[step] for step in shared] for table in tables])
    steps = tuple(shared)
    return Smoothed(
        mean=Series(steps=steps, values=tuple(map(float, values.mean(axis=0)))),
        low=Series(steps=steps, values=tuple(map(float, values.min(axis=0)))),
        high=Series(steps=steps, values=tuple(map(float, values.max(axis=0)))),
        window=1,
    )


def charts_of(record: RunRecord) -> list[Chart]:
    """Return the charts of a run that have points, the most important first."""
    return [chart for chart in (*_quality_charts(record), *_process_charts(record)) if chart]


def _quality_charts(record: RunRecord) -> Iterator[Chart]:
    series = record.series
    sets = [
        name.removesuffix("/loss")
        for name in record.names()
        if name.startswith("validation-") and name.endswith("/loss")
    ]
    gold = gold_metric(record.settings, record.names())
    if gold is not None:
        figure = gold.rpartition("/")[2]
        yield Chart(
            title="Gold metric",
            lines=(Line(label=gold, series=series(gold)),),
            left=figure,
            unit_interval=figure == "accuracy",
            is_lead=True,
        )
    truth = series("validation/accuracy")
    yield Chart(
        title="Reward, and success in validation" if truth else "Reward",
        lines=(
            Line(
                label="reward (mean, spread)",
                series=series("train/reward"),
                band=series("train/reward_std"),
                within=seen_rewards(record),
            ),
            Line(label="success in validation", series=truth, on_right=True),
        ),
        left="reward",
        right="success rate",
        right_unit_interval=True,
        is_lead=True,
    )
    yield Chart(
        title="Reward in validation",
        lines=() if truth else (Line(label="reward", series=series("validation/reward_mean")),),
        left="reward",
        is_lead=True,
    )
    yield Chart(
        title="Accuracy",
        lines=(
            Line(label="training", series=series("train/accuracy")),
            *(
                Line(label=s.removeprefix("validation-"), series=series(f"{s}/accuracy"))
                for s in sets
            ),
        ),
        left="share of pairs",
        unit_interval=True,
        is_lead=True,
    )
    yield Chart(
        title="Loss",
        lines=(
            Line(label="training", series=series("train/loss")),
            *(Line(label=s.removeprefix("validation-"), series=series(f"{s}/loss")) for s in sets),
        ),
        left="loss",
    )
    scores = [
        Line(
            label=f"{who}, {s.removeprefix('validation-')}",
            series=series(f"{s}/rewards_{who}_mean"),
        )
        for s in sets
        for who in ("chosen", "rejected")
    ]
    yield Chart(title="Scores in validation", lines=scores, left="mean score")


def _process_charts(record: RunRecord) -> Iterator[Chart]:
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
        left="share",
        unit_interval=True,
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartedRuns:
    """The runs of one curve: a single run, or several that differ only in their seeds."""

    mark: str
    """The letters of the runs."""
    label: str
    records: Sequence[RunRecord]


def overlays(several: Sequence[ChartedRuns]) -> list[Chart]:
    """Return charts that compare runs, one per metric, with one curve per group of runs."""
    curves: dict[str, tuple[Chart, Line, list[Line]]] = {}
    for compared in several:
        for title, chart, line in _curves(compared.records[0]):
            *_, lines = curves.setdefault(title, (chart, line, []))
            combined = _combined(compared, title, line)
            if combined is not None:
                lines.append(combined)
    return [
        Chart(
            title=title,
            lines=lines,
            left=chart.right if line.on_right else chart.left,
            unit_interval=chart.right_unit_interval if line.on_right else chart.unit_interval,
            is_lead=chart.is_lead,
        )
        for title, (chart, line, lines) in curves.items()
        if lines
    ]


def _curves(record: RunRecord) -> Iterator[tuple[str, Chart, Line]]:
    # The names of curves are the same in every run.
    for chart in charts_of(record):
        for line in chart.lines:
            if line.series:
                is_alone = len(chart.lines) == 1
                yield chart.title if is_alone else f"{chart.title}: {line.label}", chart, line


def _combined(compared: ChartedRuns, title: str, line: Line) -> Line | None:
    if len(compared.records) == 1:
        return Line(
            label=compared.label,
            series=line.series,
            band=line.band,
            within=line.within,
            mark=compared.mark,
        )
    several: list[Series] = [
        own_line.series
        for record in compared.records
        for name, _, own_line in _curves(record)
        if name == title
    ]
    over = over_seeds(several)
    if over is None or len(several) < len(compared.records):
        return None
    return Line(
        label=compared.label, series=over.mean, limits=(over.low, over.high), mark=compared.mark
    )

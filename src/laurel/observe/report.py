"""One HTML page about one or several runs: what was trained, how it went, what came of it.

The page is one file, needs nothing from elsewhere and forbids itself to ask for it. Without
scripts it shows everything but the sample tables, of which it then shows the first rows.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from laurel import __version__
from laurel.observe.charts import Chart, draw
from laurel.observe.comparison import Comparison
from laurel.observe.console import format_number
from laurel.observe.counts import counted
from laurel.observe.gold import gold_metric
from laurel.observe.reporting import curves
from laurel.observe.reporting.alarms import Alarm, alarms_of
from laurel.observe.reporting.evaluations import EvaluationShown, evaluation_of, lines_of
from laurel.observe.reporting.finding import Finding
from laurel.observe.reporting.findings import RULES, findings
from laurel.observe.reporting.run_charts import charts_of
from laurel.observe.reporting.run_samples import RunSamples
from laurel.observe.reporting.safe_text import one_line, script_json, visible_lines
from laurel.observe.reporting.samples import SampleTable, within
from laurel.observe.reporting.settings import Setting, changed_settings
from laurel.observe.reporting.side_by_side import SideBySide, side_by_side
from laurel.observe.reporting.time_spent import duration, timing_of
from laurel.observe.reporting.training_findings import is_success
from laurel.observe.run_record import RunRecord, read_run

TEMPLATE = "report.html.j2"
MAX_SAMPLE_BYTES = 6_000_000
"""Of the texts of all samples of a page: it has to open at once, on a phone too."""
NUM_WITHOUT_SCRIPT = 10
"""Rows of a sample table that are there without a script, and on paper."""
_TEXT_LENGTH = 600


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of the summary."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A page that follows a run."""

    version: int
    """Of the page; the server tells the newest."""
    seconds: float
    """Between two questions whether there is a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the page says of one run."""

    name: str
    """Unique in the page."""
    title: str
    line: str
    """Steps, time and place in one line."""
    charts: Sequence[tuple[Chart, str]]
    """Each with its SVG."""
    is_compared: bool
    """Its curves are drawn among those of others."""
    alarms: Sequence[Alarm]
    solved: frozenset[str]
    """Alarms that say no more than that everything is right."""
    timing: Sequence[tuple[str, float, float]]
    """Part of a step, seconds, share of the whole."""
    samples: Sequence[SampleTable]
    evaluations: Sequence[EvaluationShown]
    changed: Sequence[Setting] | None
    """Settings that are not the defaults; None where nobody knows the defaults."""
    config: str
    data: Sequence[tuple[str, Sequence[tuple[str, str]]]]


def write_report(
    path: Path,
    runs: Sequence[Path],
    *,
    title: str = "Laurel report",
    facts: Sequence[Fact] = (),
    comparisons: Sequence[Comparison] = (),
) -> None:
    """Write the page.

    Args:
        path: The file to write.
        runs: Directories that runs logged to, in the order of the page.
        title: Heading of the page.
        facts: Figures to begin with; without any, what the runs themselves tell.
        comparisons: Answers before and after training.

    Raises:
        DataError: A directory holds no run, or a file of it is broken.
    """
    records = [read_run(run) for run in runs]
    text = page_of(
        records, [RunSamples() for _ in runs], title=title, facts=facts, comparisons=comparisons
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def page_of(
    records: Sequence[RunRecord],
    samples: Sequence[RunSamples],
    *,
    title: str,
    facts: Sequence[Fact] = (),
    comparisons: Sequence[Comparison] = (),
    live: Live | None = None,
) -> str:
    """The page as text.

    Args:
        records: The runs, in the order of the page.
        samples: What reads the samples of each.
        title: Heading of the page.
        facts: Figures to begin with; without any, what the runs themselves tell.
        comparisons: Answers before and after training.
        live: The page asks its server for newer ones.
    """
    compared = side_by_side(records)
    tables = [reader.tables(record) for reader, record in zip(samples, records, strict=True)]
    kept = iter(within([table for of_run in tables for table in of_run], MAX_SAMPLE_BYTES))
    sections = [
        _section(record, f"run{i}", compared, [next(kept) for _ in of_run])
        for i, (record, of_run) in enumerate(zip(records, tables, strict=True), start=1)
    ]
    environment = _environment()
    script = page_script()
    return str(
        environment.get_template(TEMPLATE).render(
            title=title, version=__version__, facts=list(facts) or _facts_of(records, compared),
            sentences=[_sentence(record, compared.name_of(record)) for record in records],
            findings=_findings(records, compared), num_rules=len(RULES), compared=compared,
            compared_charts=[
                (chart, draw(chart, name=f"compared-chart{i}"))
                for i, chart in enumerate(compared.charts, start=1)
            ],
            comparisons=comparisons, sections=sections, live=live, script=script,
            style=_source("report.css"), policy=content_policy(script, live),
            num_without_script=NUM_WITHOUT_SCRIPT,
            curves={"few": curves.FEW_POINTS, "share": curves.SMOOTHED_SHARE,
                    "middle": round(100 * (curves.HIGH - curves.LOW)), "places": curves.NUM_PLACES},
        )
    )  # fmt: skip


def content_policy(script: str, live: Live | None) -> str:
    """What a browser may do with the page: run this script, ask this server, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
    asks = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; {asks}"
        "base-uri 'none'; form-action 'none'"
    )


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("laurel.observe"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
        # What is drawn here is Markup and stays as it is.
        finalize=lambda value: visible_lines(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "number": _number, "shown": _shown, "seconds": duration, "script_json": _script_json,
        "key": _breakable, "in_one_row": lambda row: (row[0], *row[1]),
    }  # fmt: skip
    return environment


def page_script() -> Any:
    """The script of every page."""
    return _source("report.js")


@cache
def _source(name: str) -> Any:
    """A file that becomes part of the page as it is."""
    from markupsafe import Markup

    folder = resources.files("laurel.observe") / "templates"
    return Markup((folder / name).read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------- summary


def _facts_of(records: Sequence[RunRecord], compared: SideBySide) -> list[Fact]:
    """What the runs tell of themselves: the last value of what they are judged by."""
    facts = []
    for record in records:
        title = compared.name_of(record)
        gold = gold_metric(record.settings, record.names())
        if gold is not None:
            facts += _from_to(record, title, gold, "the gold metric; ")
        for name in ("validation/accuracy", "validation/reward_mean", "train/reward"):
            if name != gold and (found := _from_to(record, title, name)):
                facts += found
                break
        for name in record.names():
            if name.startswith("validation-") and name.endswith(("/accuracy", "/perplexity")):
                last = format_number(record.series(name).values[-1])
                facts.append(Fact(f"{title}: {name}", last))
    return facts


def _from_to(record: RunRecord, title: str, name: str, what: str = "") -> list[Fact]:
    """The last value of a metric beside its first one; nothing where it was never measured."""
    series = record.series(name)
    if not series:
        return []
    first, last = (format_number(series.values[i]) for i in (0, -1))
    return [Fact(f"{title}: {name}", last, f"{what}{first} at the beginning")]


def _sentence(record: RunRecord, name: str) -> str:
    """A run in plain words."""
    what = {
        "sft": "learned to imitate demonstrations",
        "rm": "learned which of two answers people prefer",
        "grpo": "learned from the rewards of its own answers",
    }.get(record.kind, "ran")
    took = "" if record.seconds is None else f" in {duration(record.seconds)}"
    said = f"{name}: {what}, {counted(record.num_steps, 'step')}{took}."
    shares = record.series("performance/reward_hidden_share")
    if shares:
        mean = math.fsum(shares.values) / len(shares.values)
        said += f" {mean:.0%} of the time of judging was hidden behind drawing."
    return said


def findings_of(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """What to look at first, of each run: `name`, `directory` and `findings`, for programs.

    Args:
        runs: Directories that runs logged to.

    Raises:
        DataError: A directory holds no run, or a file of it is broken.
    """
    records = [read_run(run) for run in runs]
    found = _findings(records, side_by_side(records))
    return [
        {"name": name, "directory": run, "findings": [asdict(one) for one in of_run]}
        for run, (name, of_run) in zip(runs, found, strict=True)
    ]


def _findings(
    records: Sequence[RunRecord], compared: SideBySide
) -> list[tuple[str, Sequence[Finding]]]:
    """Of each run, what to look at first."""
    return [(compared.name_of(record), findings(record)) for record in records]


# ----------------------------------------------------------------------------------------- a run


def _section(
    record: RunRecord, name: str, compared: SideBySide, samples: Sequence[SampleTable]
) -> Section:
    took = "" if record.seconds is None else f", {duration(record.seconds)}"
    is_compared = compared.draws(record)
    charts = [] if is_compared else charts_of(record)
    alarms = alarms_of(record.health)
    return Section(
        name=name,
        title=compared.name_of(record),
        line=f"{counted(record.num_steps, 'step')}{took}; logged in {record.path}",
        charts=[
            (chart, draw(chart, name=f"{name}-chart{i}")) for i, chart in enumerate(charts, start=1)
        ],
        is_compared=is_compared,
        alarms=alarms,
        solved=frozenset(alarm.name for alarm in alarms if is_success(alarm, record)),
        timing=timing_of(record),
        samples=samples,
        evaluations=[evaluation_of(file, report) for file, report in record.evaluations.items()],
        changed=changed_settings(record.kind, record.settings),
        config=record.config,
        data=[(split, list(lines_of(report))) for split, report in record.data.items()],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else format_number(value)


def _shown(text: str) -> str:
    """A text of a model or a data set in one line, not too long."""
    return one_line(text, _TEXT_LENGTH)


def _breakable(name: str) -> Any:
    """A dotted or slashed name that a narrow page breaks between its words, not within."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[./_])(?=\w)", "<wbr>", str(escape(visible_lines(name)))))


def _script_json(table: SampleTable) -> Any:
    from markupsafe import Markup

    return Markup(script_json({"columns": table.columns, "kinds": table.kinds, "rows": table.rows}))

"""Writes the report: one HTML page about one or several runs.

The page is one file, which needs no other resources, and whose content policy forbids loading any.
Without scripts it shows everything, but only the first rows of sample tables.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import yaml

from laurel import __version__
from laurel.config.schema_info import Kinds, step_into
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section as ConfigSection
from laurel.errors import counted
from laurel.extensions.report import charts as curves
from laurel.extensions.report.charts import Chart, ChartedRuns, charts_of, overlays, plot_chart
from laurel.extensions.report.evaluations import evaluation_of, lines_of, percent_text
from laurel.extensions.report.samples import (
    RunSamples,
    SampleTable,
    one_line,
    script_json,
    visible_lines,
    within,
)
from laurel.observe.comparisons import Comparison
from laurel.observe.console import BASELINES, format_number
from laurel.observe.history import gold_metric
from laurel.observe.loggers import flat
from laurel.observe.rules import RULES, RunFinding, findings, is_success
from laurel.observe.run_record import RunRecord, alarms_of, read_run_record

# The kind of a logged run may be any text.
_SCHEMAS = {str(kind): schema for kind, schema in SCHEMAS.items()}
_SEEDS_AND_PLACES = re.compile(r"(^|\.)seed$|^logger\.|^checkpointing\.checkpoint_dir$", re.ASCII)
"""The keys in which runs of one experiment may differ: seeds and directories."""
MISSING = "–"


class ChangedSetting(NamedTuple):
    """A setting that differs from its default."""

    key: str
    value: str
    default: str


def changed_settings(kind: str, config: Mapping[str, Any]) -> list[ChangedSetting] | None:
    """Return the settings that differ from this version's defaults, in their order.

    None if the kind of the run is unknown.
    """
    schema = _SCHEMAS.get(kind)
    if schema is None or not config:
        return None
    defaults = dict(flat(schema().model_dump(mode="json")))
    # A block that is empty or null by default, such as the arguments of an optimizer or the names
    # of environments, has no keys to compare with.
    blocks = {key for key, value in defaults.items() if value in (None, {}, [])}
    settings = []
    for key, value in flat(config):
        is_known = key in defaults or any(key.startswith(f"{block}.") for block in blocks)
        default = defaults.get(key)
        if value != default:
            settings.append(
                ChangedSetting(key, yaml_text(value), yaml_text(default) if is_known else "unknown")
            )
    return settings


def differing_settings(
    configs: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[str]]]:
    """Return the keys in which runs differ, each with its value in every run."""
    tables = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [yaml_text(table[key]) if key in table else MISSING for table in tables]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def same_but_for_seeds(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group the runs whose settings differ only in seeds and directories; return their indices.

    A run without a configuration forms its own group.
    """
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        settings = {
            key: yaml_text(v) for key, v in flat(config) if not _SEEDS_AND_PLACES.search(key)
        }
        groups.setdefault(
            repr(sorted(settings.items())) if settings else f"run {index}", []
        ).append(index)
    return list(groups.values())


def yaml_text(value: object) -> str:
    """Write a value as YAML in one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    return str(value)


TEMPLATE = "report.html.j2"
MAX_SAMPLE_BYTES = 6_000_000
"""The maximum size of all sample texts of a page, which must open quickly even on a phone."""
NUM_WITHOUT_SCRIPT = 10
"""The number of rows of a sample table that are shown without a script, and on paper."""
_TEXT_LENGTH = 600


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of the summary, with a note."""

    name: str
    value: str
    note: str = ""
    term: str = ""
    """The name of the metric, whose explanation is shown on hover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The settings of a page that follows a run in progress."""

    version: int
    """The version of the page, which the browser compares with the server's."""
    seconds: float
    """The seconds between two requests for a newer version."""


def write_report(
    path: Path,
    runs: Sequence[Path],
    *,
    title: str = "Laurel report",
    facts: Sequence[Fact] = (),
    comparisons: Sequence[Comparison] = (),
) -> None:
    """Write the page about some runs to a file.

    Args:
        runs: The directories to which the runs logged, in the order of the page.
        facts: The numbers of the summary; if empty, the last values of the runs' metrics.

    Raises:
        DataError: A directory holds no run, or a file of it is broken.
    """
    records = [read_run_record(run) for run in runs]
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
    """Return the page about some runs as HTML.

    Args:
        samples: A reader of the samples for each run.
        facts: The numbers of the summary; if empty, the last values of the runs' metrics.
        live: The settings of a page that asks its server for newer versions; None for a file.
    """
    compared = compare_runs(records)
    tables = [reader.tables(record) for reader, record in zip(samples, records, strict=True)]
    # All tables of the page share one limit, so that they are cut together.
    shown_tables = iter(within([table for of_run in tables for table in of_run], MAX_SAMPLE_BYTES))
    sections = [
        _section(record, f"run{i}", compared, [next(shown_tables) for _ in of_run])
        for i, (record, of_run) in enumerate(zip(records, tables, strict=True), start=1)
    ]
    environment = _environment()
    script = page_script()
    compared_charts = [
        (chart, plot_chart(chart, name=f"compared-chart{i}"))
        for i, chart in enumerate(compared.charts, start=1)
    ]
    # Rendering adds each explanation that it shows, with its term; the page lists them at its end.
    terms: dict[str, str] = {}
    environment.filters["explained"] = lambda term: _explained(term, terms)
    return str(
        environment.get_template(TEMPLATE).render(
            title=title,
            version=__version__,
            facts=list(facts) or _facts_of(records, compared),
            sentences=[_sentence(record, compared.name_of(record)) for record in records],
            findings=_findings(records, compared),
            num_rules=sum(rule.is_in_report for rule in RULES.values()),
            compared=compared,
            compared_leads=compared_charts[: _num_leads(compared.charts)],
            compared_charts=compared_charts[_num_leads(compared.charts) :],
            terms=terms,
            comparisons=comparisons,
            sections=sections,
            live=live,
            script=script,
            style=_source("report.css"),
            policy=content_policy(script, live),
            num_without_script=NUM_WITHOUT_SCRIPT,
            curves={
                "few": curves.FEW_POINTS,
                "share": curves.SMOOTHED_SHARE,
                "middle": round(100 * (curves.HIGH - curves.LOW)),
                "places": curves.NUM_PLACES,
            },
        )
    )


def content_policy(script: str, live: Live | None) -> str:
    """Return the Content-Security-Policy, which allows this script and requests to this server."""
    # With the hash of the page's only script, text that escaped the escaping cannot run.
    digest = base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
    asks = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; {asks}"
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Any:
    # Kept with its compiled templates: a page that is shown live is rendered again and again.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("laurel.extensions.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Charts are Markup and stay as they are.
        finalize=lambda value: visible_lines(value) if type(value) is str else value,
    )
    environment.filters |= {
        "number": lambda value: MISSING if value is None else format_number(value),
        "shown": lambda text: one_line(text, _TEXT_LENGTH),
        "seconds": duration,
        "script_json": lambda table: Markup(
            script_json({"columns": table.columns, "kinds": table.kinds, "rows": table.rows})
        ),
        # A narrow page breaks a dotted or slashed name between its words.
        "key": lambda name: Markup(
            re.sub(r"(?<=[./_])(?=\w)", "<wbr>", str(escape(visible_lines(name))))
        ),
        "about_setting": lambda key, kind: explain_setting(_SCHEMAS.get(kind), key),
        "in_one_row": lambda row: (row[0], *row[1]),
    }
    return environment


def page_script() -> Any:
    """Return the script of every page."""
    return _source("report.js")


@cache
def _source(name: str) -> Any:
    from markupsafe import Markup

    folder = resources.files("laurel.extensions.report") / "templates"
    return Markup((folder / name).read_text(encoding="utf-8"))


@cache
def _terms() -> Mapping[str, str]:
    terms: Mapping[str, str] = yaml.safe_load(_source("terms.yaml"))
    return terms


def explain(term: str) -> str:
    """Return the explanation of a term or of a metric's full name; empty if there is none."""
    terms = _terms()
    explanation = terms.get(term.lower()) or terms.get(term.rpartition("/")[2])
    if explanation is None and term.endswith("% interval"):
        return "The range that holds the true value with this confidence, by bootstrap over pairs."
    return explanation or ""


def explain_setting(schema: type[ConfigSection] | None, key: str) -> str:
    """Return the description of a dotted key of a run's configuration; empty if unknown."""
    text = ""
    kinds: Kinds = () if schema is None else (schema,)
    for part in key.split("."):
        step = step_into(kinds, part)
        text = (step.field.description or "") if step.field else ""
        kinds = step.kinds
    return " ".join(text.split())


def _facts_of(records: Sequence[RunRecord], compared: SideBySide) -> list[Fact]:
    """Return the last values of the runs' main metrics as facts."""
    facts = []
    for record in records:
        title = compared.name_of(record)
        gold = gold_metric(record.settings, record.names())
        if gold is not None:
            facts += _from_to(record, title, gold, ["the gold metric"])
        for name in ("validation/accuracy", "validation/reward_mean", "train/reward"):
            if name != gold and (latest := _from_to(record, title, name)):
                facts += latest
                break
        for name in record.names():
            if name.startswith("validation-") and name.endswith(("/accuracy", "/perplexity")):
                facts += _from_to(record, title, name)
    return facts


def _from_to(record: RunRecord, title: str, name: str, about: Sequence[str] = ()) -> list[Fact]:
    """Return a fact about a metric: its last value, with its row count, baselines and first value.

    The texts `about` begin the note of the fact. A metric without values gives an empty list.
    """
    series = record.series(name)
    if not series:
        return []
    section, _, figure = name.rpartition("/")
    is_share = figure == "accuracy"
    notes = list(about)
    counts = (record.latest(f"{section}/{key}") for key in ("num_valid_samples", "num_samples"))
    count = next((number for number in counts if number is not None), None)
    baselines = [
        (label, value)
        for key, label in BASELINES.items()
        if (value := record.latest(f"{section}/{key}")) is not None
    ]
    if count is not None:
        notes.append(counted(round(count), "pair" if baselines else "completion"))
    notes += [f"{label} {percent_text(value)}" for label, value in baselines]
    shown = [percent_text(v) if is_share else format_number(v) for v in series.values]
    if len(shown) > 1:
        notes.append(f"{shown[0]} at step {series.steps[0]:,.0f}")
    return [Fact(f"{title}: {name}", shown[-1], "; ".join(notes), term=name)]


def _sentence(record: RunRecord, name: str) -> str:
    what = {
        "sft": "learned to imitate demonstrations",
        "rm": "learned which of two answers people prefer",
        "grpo": "learned from the rewards of its own answers",
    }.get(record.kind, "ran")
    took = "" if record.seconds is None else f" in {duration(record.seconds)}"
    text = f"{name}: {what}, {counted(record.num_steps, 'step')}{took}."
    shares = record.series("performance/reward_hidden_share")
    if shares:
        mean = math.fsum(shares.values) / len(shares.values)
        text += f" {mean:.0%} of the time of scoring was hidden behind sampling."
    return text


def findings_of(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return for each run its `name`, its `directory` and its `findings`, most important first.

    Raises:
        DataError: A directory holds no run, or a file of it is broken.
    """
    records = [read_run_record(run) for run in runs]
    findings_of_runs = _findings(records, compare_runs(records))
    return [
        {"name": name, "directory": run, "findings": [asdict(finding) for finding in of_run]}
        for run, (name, of_run) in zip(runs, findings_of_runs, strict=True)
    ]


def _findings(
    records: Sequence[RunRecord], compared: SideBySide
) -> list[tuple[str, Sequence[RunFinding]]]:
    return [(compared.name_of(record), findings(record)) for record in records]


def _section(
    record: RunRecord, name: str, compared: SideBySide, samples: Sequence[SampleTable]
) -> dict[str, Any]:
    """Return what the template shows of a run; all ids of its section begin with `name`."""
    took = "" if record.seconds is None else f", {duration(record.seconds)}"
    is_compared = compared.has_curves_of(record)
    charts = [] if is_compared else charts_of(record)
    pictures = [
        (chart, plot_chart(chart, name=f"{name}-chart{i}"))
        for i, chart in enumerate(charts, start=1)
    ]
    alarms = alarms_of(record.health)
    return {
        "name": name,
        "kind": record.kind,
        "leads": pictures[: _num_leads(charts)],  # at the top of the page
        "charts": pictures[_num_leads(charts) :],
        "title": compared.name_of(record),
        "line": f"{counted(record.num_steps, 'step')}{took}; logged in {record.path}",
        "is_compared": is_compared,
        "alarms": alarms,
        # Some alarms only mean that the tasks are solved.
        "solved": {alarm.name for alarm in alarms if is_success(alarm, record)},
        "timing": timing_of(record),
        "samples": samples,
        "evaluations": [
            evaluation_of(file, content) for file, content in record.evaluations.items()
        ],
        "changed": changed_settings(record.kind, record.settings),
        "config": record.config,
        "data": [(split, list(lines_of(report))) for split, report in record.data.items()],
    }


def _num_leads(charts: Sequence[Chart]) -> int:
    """Return how many charts lead the page: two if the first two are lead charts, otherwise one."""
    leads = [chart.is_lead for chart in charts[:2]]
    return len(leads) if all(leads) else 1


def _explained(term: str, terms: dict[str, str]) -> str:
    about = explain(term)
    # Of several names with one explanation the shortest is listed.
    if about and len(term) < len(terms.get(about, f"{term}.")):
        terms[about] = term
    return about


_FIGURES = ("accuracy", "loss", "reward_mean", "perplexity", "reward", "truncation_rate")
"""The metrics whose last values are compared, of training and of every validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The comparison of the runs of the most frequent kind (`RunRecord.kind`).

    It is empty if no two runs have the same kind.
    """

    names: Sequence[tuple[RunRecord, str]]
    """The name of each run on the page."""
    marks: Sequence[str]
    """The letters of the runs that are compared, in the order of the columns."""
    compared: Sequence[RunRecord] = ()
    charts: Sequence[Chart] = ()
    figures: Sequence[tuple[str, Sequence[str]]] = ()
    """The name of each metric, and its last value in every run."""
    settings: Sequence[tuple[str, Sequence[str]]] = ()
    """Each key in which the runs differ, and its value in every run."""
    seeds: Sequence[str] = ()
    """A sentence for each group of runs that differ only in seeds and directories."""

    def name_of(self, record: RunRecord) -> str:
        """Return the name of a run on the page."""
        return next(name for run, name in self.names if run is record)

    def has_curves_of(self, record: RunRecord) -> bool:
        """Report whether the curves of a run are plotted together with those of other runs."""
        return any(run is record for run in self.compared)


def compare_runs(records: Sequence[RunRecord]) -> SideBySide:
    """Name all runs, and compare those of the most frequent kind."""
    marks = [_letter(index) for index in range(len(records))]
    if len(records) < 2:
        return SideBySide(names=[(record, record.title) for record in records], marks=())
    paths = _short_paths(records)
    names = [
        (record, f"{mark}, {record.title}" + (f" {path}" if path != record.title else ""))
        for mark, record, path in zip(marks, records, paths, strict=True)
    ]
    kinds = [record.kind for record in records]
    # Curves of different kinds of runs have nothing in common.
    most = max(kinds, key=kinds.count)
    indices = [index for index, kind in enumerate(kinds) if kind == most]
    if len(indices) < 2:
        return SideBySide(names=names, marks=())
    several = [records[index] for index in indices]
    groups = same_but_for_seeds([record.settings for record in several])
    return SideBySide(
        names=names,
        marks=[marks[index] for index in indices],
        compared=several,
        charts=overlays(
            [
                _compared(
                    group,
                    several,
                    [marks[index] for index in indices],
                    [paths[index] for index in indices],
                )
                for group in groups
            ]
        ),
        figures=_compared_figures(several),
        settings=differing_settings([record.settings for record in several]),
        seeds=[
            f"{_joined([marks[indices[i]] for i in group])} differ in nothing but seeds and "
            "places: they are one curve, the mean, in a band from the lowest to the highest of "
            "them."
            for group in groups
            if len(group) > 1
        ],
    )


def _compared(
    group: Sequence[int], several: Sequence[RunRecord], marks: Sequence[str], places: Sequence[str]
) -> ChartedRuns:
    letters = [marks[index] for index in group]
    runs = [several[index] for index in group]
    # A letter and the name of the directory say more than the kind, which all runs share.
    label = f"{letters[0]} {places[group[0]]}" if len(runs) == 1 else f"mean of {_joined(letters)}"
    return ChartedRuns(mark="".join(letters), label=label, records=runs)


def _compared_figures(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for record in records for name in record.names())
    rows = []
    for name in names:
        section, _, figure = name.rpartition("/")
        if figure not in _FIGURES or not section.startswith(("train", "validation")):
            continue
        latest = [record.latest(name) for record in records]
        if "/" not in section and sum(value is not None for value in latest) > 1:
            shown = [MISSING if value is None else format_number(value) for value in latest]
            rows.append((name, shown))
    return rows


def _short_paths(records: Sequence[RunRecord]) -> list[str]:
    """Return the shortest ends of the runs' directories that distinguish them."""
    parts = [record.path.absolute().parts for record in records]
    paths = []
    for own in parts:
        others = [other for other in parts if other != own]
        lengths = range(1, len(own))
        shortest = (n for n in lengths if all(other[-n:] != own[-n:] for other in others))
        paths.append("/".join(own[-next(shortest, len(own)) :]))
    return paths


def _letter(index: int) -> str:
    # A to Z, then A2 and on.
    rounds, letter = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(rounds + 1) if rounds else "")


def _joined(letters: Sequence[str]) -> str:
    return f"{', '.join(letters[:-1])} and {letters[-1]}"


_PARTS = {
    "timing/train/generation": "generation, with its rewards",
    "timing/train/reward_calculation": "advantages",
    "timing/train/policy_and_reference_logprobs": "log-probabilities before the update",
    "timing/train/policy_training": "update",
    "timing/train/prepare_for_generation/transfer_and_update_weights": "weights to the generator",
    "timing/train/checkpointing": "checkpoints",
}


def timing_of(record: RunRecord) -> list[tuple[str, float, float]]:
    """Return the name, the seconds and the share of each part of a run's time, without overlaps."""
    parts = {label: record.total(name) for name, label in _PARTS.items()}
    steps = record.total("timing/train/total_step_time")
    validation = record.total("timing/validation/total_validation_time")
    if any(parts.values()):
        inside = sum(parts.values()) - parts["checkpoints"]
        parts["other"] = max(0.0, steps - inside)
    if parts.get("other", 0.0) == steps:
        parts = {"steps": steps, "checkpoints": parts["checkpoints"]}
    parts["validation"] = validation
    whole = math.fsum(parts.values())
    return [(label, value, value / whole) for label, value in parts.items() if value > 0]


def duration(seconds: float) -> str:
    """Format seconds, e.g. `42 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

"""Several runs beside one another: curves over each other, figures, and settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from laurel.observe.charts import Chart
from laurel.observe.console import format_number
from laurel.observe.reporting.run_charts import Compared, overlays
from laurel.observe.reporting.settings import MISSING, differing_settings, same_but_for_seeds
from laurel.observe.run_record import RunRecord

_FIGURES = ("accuracy", "loss", "reward_mean", "perplexity", "reward", "truncation_rate")
"""Figures whose last values are compared, of training and of every validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What a page says of runs of one kind together. With one run of each kind, nothing."""

    names: Sequence[tuple[RunRecord, str]]
    """What each run is called on the page."""
    marks: Sequence[str]
    """The letters of the runs that are compared, in the order of the columns."""
    compared: Sequence[RunRecord] = ()
    charts: Sequence[Chart] = ()
    figures: Sequence[tuple[str, Sequence[str]]] = ()
    """Name, and the last value in every run."""
    settings: Sequence[tuple[str, Sequence[str]]] = ()
    """Key, and its value in every run."""
    seeds: Sequence[str] = ()
    """A sentence for each group of runs that differ in nothing but their seeds."""

    def name_of(self, record: RunRecord) -> str:
        """What the page calls a run."""
        return next(name for one, name in self.names if one is record)

    def draws(self, record: RunRecord) -> bool:
        """Whether the curves of the run are among those drawn over each other."""
        return any(one is record for one in self.compared)


def side_by_side(records: Sequence[RunRecord]) -> SideBySide:
    """The comparison of the runs that are of the kind that most of them are."""
    marks = [_letter(index) for index in range(len(records))]
    if len(records) < 2:
        return SideBySide(names=[(record, record.title) for record in records], marks=())
    places = _places(records)
    names = [
        (record, _name(mark, record, place))
        for mark, record, place in zip(marks, records, places, strict=True)
    ]
    kinds = [record.kind for record in records]
    most = max(kinds, key=kinds.count)
    chosen = [index for index, kind in enumerate(kinds) if kind == most]
    if len(chosen) < 2:
        return SideBySide(names=names, marks=())
    several = [records[index] for index in chosen]
    groups = same_but_for_seeds([record.settings for record in several])
    return SideBySide(
        names=names,
        marks=[marks[index] for index in chosen],
        compared=several,
        charts=overlays(
            [
                _compared(
                    group, several, [marks[at] for at in chosen], [places[at] for at in chosen]
                )
                for group in groups
            ]
        ),
        figures=_figures(several),
        settings=differing_settings([record.settings for record in several]),
        seeds=[
            f"{_joined([marks[chosen[i]] for i in group])} differ in nothing but seeds and places: "
            "they are one curve, the mean, in a band from the lowest to the highest of them."
            for group in groups
            if len(group) > 1
        ],
    )


def _compared(
    group: Sequence[int], several: Sequence[RunRecord], marks: Sequence[str], places: Sequence[str]
) -> Compared:
    letters = [marks[index] for index in group]
    runs = [several[index] for index in group]
    # A letter and the name of the directory tell more than the kind, which all have in common.
    label = f"{letters[0]} {places[group[0]]}" if len(runs) == 1 else f"mean of {_joined(letters)}"
    return Compared(mark="".join(letters), label=label, records=runs)


def _figures(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
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


def _name(mark: str, record: RunRecord, place: str) -> str:
    return f"{mark}, {record.title}" if place == record.title else f"{mark}, {record.title} {place}"


def _places(records: Sequence[RunRecord]) -> list[str]:
    """The last names of each directory: as many as tell it from others that end alike."""
    parts = [record.path.absolute().parts for record in records]
    return [_shortest(own, [one for one in parts if one != own]) for own in parts]


def _shortest(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    for length in range(1, len(own)):
        if not any(one[-length:] == own[-length:] for one in others):
            return "/".join(own[-length:])
    return "/".join(own)


def _letter(index: int) -> str:
    """A to Z, then A2 and on."""
    rounds, place = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(rounds + 1) if rounds else "")


def _joined(letters: Sequence[str]) -> str:
    return f"{', '.join(letters[:-1])} and {letters[-1]}"

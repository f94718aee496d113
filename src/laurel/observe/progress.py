"""Shows the progress of a run, as a live display on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as ProgressTask
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laurel.observe.console import format_number, print_urgent, visible, wrapped

_SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "accuracy": "accuracy",
    "lr": "lr",
    "grad_norm": "grad norm",
}
"""The labels of the metrics that are displayed, by the last part of their names."""
_RATE_STEPS = 20
"""The number of steps over which the rate is averaged."""
_SECONDS_BETWEEN_LINES = 5.0


class _Work(NamedTuple):
    """The work of a run up to one moment, without phases."""

    seconds: float
    pairs: int
    tokens: int


class ProgressPhase:
    """A part of a run besides training steps, such as a validation."""

    def __init__(
        self, name: str, total: int | None, on_change: Callable[[ProgressPhase], None]
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._on_change = on_change

    def advance(self, count: int = 1) -> None:
        """Add `count` to the number of finished units of work."""
        self.done += count
        self._on_change(self)


class ProgressWords(NamedTuple):
    """What the display of a program says that it counts and does."""

    unit: str = "pairs"
    """What a step's throughput is counted in."""
    counted: str = "step"
    doing: str = "training"


TRAINING = ProgressWords()


class TrainingProgress:
    """Shows the step, the time left, the rate and the latest metrics of a training run.

    A terminal gets a live display. A file, a pipe or CI gets a line at most every 5 seconds, and at
    the first and the last step; a phase gets one for each tenth of its work. `live` overrides the
    choice. Rates are those of training, without phases; the time left includes everything but the
    phases before the first step, which come once, and does not grow while a step goes on. `unit`
    names the rows of a step, `counted` the steps, and `doing` the activity. Of steps of which
    `side_by_side` go on at the same time, the first to end have had all the time, so the time left
    is unknown until so many are done.

    Example::

        with TrainingProgress(total_steps=100, start_step=0, console=make_console()) as progress:
            progress.step(1, {"train/loss": 0.69}, pairs=128, tokens=40_000)
            with progress.phase("validating", total=12) as phase:
                phase.advance()
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        console: Console,
        *,
        live: bool | None = None,
        words: ProgressWords = TRAINING,
        side_by_side: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._start_step = start_step
        self._step = start_step
        self._console = console
        self._words = words
        self._side_by_side = side_by_side
        self._clock = clock
        self._metrics: dict[str, float] = {}
        self._phase: ProgressPhase | None = None
        self._phase_seconds = 0.0
        self._seconds_before = 0.0
        self._history: deque[_Work] = deque(maxlen=_RATE_STEPS + 1)
        self._started = self._step_ended = clock()
        self._last_line: float | None = None
        self._printed_step = start_step
        if live is None:
            # FORCE_COLOR makes any file a "terminal"; a display needs a real one.
            live = console.is_interactive and console.file.isatty()
        self._live = Live(self, console=console, refresh_per_second=4) if live else None

    @property
    def console(self) -> Console:
        """The console of the display; lines that are printed on it appear above the display."""
        return self._console

    def __enter__(self) -> TrainingProgress:
        self._started = self._clock()
        self._history.append(_Work(0.0, 0, 0))
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._printed_step != self._step:
            self._print_line(self._step_line())

    def step(self, step: int, metrics: Mapping[str, float], pairs: int, tokens: int) -> None:
        """Show that a step is finished, with its metrics and the rows and tokens of its batch."""
        if self._step == self._start_step:
            self._seconds_before = self._phase_seconds
        self._step = step
        # Metrics of earlier steps are not shown, as they would be taken for those of this step.
        # The display shows only the last part of names; files hold the full names.
        short_names = {name.rpartition("/")[2]: value for name, value in metrics.items()}
        self._metrics = {k: float(v) for k, v in short_names.items() if k in _SHOWN}
        before = self._history[-1] if self._history else _Work(0.0, 0, 0)
        self._step_ended = self._clock()
        seconds = self._step_ended - self._started - self._phase_seconds
        self._history.append(_Work(seconds, before.pairs + pairs, before.tokens + tokens))
        if self._live is None and (step >= self._total_steps or self._is_line_due()):
            self._print_line(self._step_line())
            self._printed_step = step

    def message(self, text: str, *, is_routine: bool = False) -> None:
        """Print a line above the display; `laurel --quiet` omits routine lines."""
        shown = "\n".join(map(visible, text.split("\n")))
        if is_routine:
            self._print(shown)
        else:
            print_urgent(self._console, shown)

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, *, timed: bool = False
    ) -> Iterator[ProgressPhase]:
        """Show a second bar for a part of a step, or for work besides training.

        Args:
            total: The number of units of work; None if it is unknown.
            timed: Whether the phase is part of a step, so that the rates include its time.
        """
        outer, started = self._phase, self._clock()
        shown = -1  # tenths of the work

        def changed(phase: ProgressPhase) -> None:
            nonlocal shown
            tenths = None if phase.total is None else 10 * phase.done // max(1, phase.total)
            if self._live is None and tenths != shown and self._is_line_due():
                self._print_line(f"{visible(phase.name)} {_count(phase)}".rstrip())
                shown = shown if tenths is None else tenths

        self._phase = ProgressPhase(name, total, changed)
        try:
            yield self._phase
        finally:
            self._phase = outer
            if outer is None and not timed:
                self._phase_seconds += self._clock() - started

    def __rich__(self) -> RenderableType:
        """Render the live display."""
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(no_wrap=True, justify="right")
        counts = f"{self._step}/{self._total_steps} {self._percentage()}"
        bars.add_row(Text(self._words.doing), _bar(self._step, self._total_steps), Text(counts))
        phase = self._phase
        if phase is not None:
            bars.add_row(
                Text(visible(phase.name)), _bar(phase.done, phase.total), Text(_count(phase))
            )
        width = self._console.width
        rates_and_times = wrapped("  ".join([*self._rates(), self._times()]), width)
        numbers = wrapped("  ".join(self._numbers()), width)
        return Group(bars, Text(numbers), Text(rates_and_times, style="dim"))

    def _is_line_due(self) -> bool:
        return self._last_line is None or self._clock() - self._last_line >= _SECONDS_BETWEEN_LINES

    def _print_line(self, line: str) -> None:
        self._last_line = self._clock()
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _step_line(self) -> str:
        head = f"{self._words.counted} {self._step}/{self._total_steps} ({self._percentage()})"
        return "  ".join([head, *self._numbers(), *self._rates(), self._times()])

    def _numbers(self) -> list[str]:
        return [
            f"{label} {format_number(self._metrics[name])}"
            for name, label in _SHOWN.items()
            if name in self._metrics
        ]

    def _rates(self) -> list[str]:
        if len(self._history) < 2:
            return []
        first, last = self._history[0], self._history[-1]
        seconds = max(last.seconds - first.seconds, 1e-9)
        done = {self._words.unit: last.pairs - first.pairs, "tokens": last.tokens - first.tokens}
        return [
            f"{_rate(n / seconds)} {unit}/s" for unit, n in done.items() if n or unit != "tokens"
        ]

    def _times(self) -> str:
        # The rate counts from this start, because a resumed run took no time for earlier steps.
        elapsed = self._clock() - self._started
        done = self._step - self._start_step
        to_do = max(0, self._total_steps - self._step)
        is_known = done > 0 and (done >= self._side_by_side or not to_do)
        left = "?"
        if is_known:
            # Within a step the time left runs down by the seconds of one, then it stands still.
            of_a_step = (self._step_ended - self._started - self._seconds_before) / done
            since = self._clock() - self._step_ended
            left = _duration(max(0.0, of_a_step * to_do - min(since, of_a_step)))
        return f"elapsed {_duration(elapsed)}  left {left}"

    def _percentage(self) -> str:
        return f"{100 * min(1.0, self._step / max(1, self._total_steps)):.0f}%"


def _bar(done: int, total: int | None) -> ProgressBar:
    return ProgressBar(
        total=float(max(1, total)) if total is not None else None, completed=float(done)
    )


def _count(phase: ProgressPhase) -> str:
    if phase.total is not None:
        return f"{phase.done}/{phase.total}"
    return f"{phase.done}" if phase.done else ""  # a phase that counts nothing


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _rate(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


class _RowRate(ProgressColumn):
    def render(self, task: ProgressTask) -> Text:
        return Text(f"{task.speed:,.1f} rows/s" if task.speed else "")


class RowProgress:
    """Shows a bar with the rate and the time left, on a terminal and if there are several chunks.

    It is hidden while scores are printed on the same screen.
    """

    def __init__(
        self, console: Console, num_rows: int | None, *, chunk: int, shares_screen: bool
    ) -> None:
        """Create the bar without showing it.

        Args:
            num_rows: The total number of rows; None if it is unknown.
            chunk: The number of rows that are scored at a time.
            shares_screen: Whether the scores are printed on the same screen, so that the bar must
                be hidden after every chunk.
        """
        self._progress = Progress(
            TextColumn("scoring"),
            BarColumn(),
            MofNCompleteColumn(),
            _RowRate(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not (console.is_interactive and console.file.isatty()),
        )
        self._task = self._progress.add_task("scoring", total=num_rows)
        self._is_wanted = num_rows is not None and num_rows > chunk
        self._shares_screen = shares_screen
        self._done = 0

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self) -> None:
        """Show the bar at the beginning of a chunk."""
        if self._is_wanted:
            self._progress.start()

    def advance(self, num_rows: int, num_tokens: int) -> None:
        """Count rows of the current chunk as scored."""
        self._progress.advance(self._task, num_rows)

    def hide(self, *, done: int) -> None:
        """Count a chunk of `done` rows as finished, and hide the bar if it shares the screen."""
        self._done += done
        self._is_wanted = True
        self._progress.update(self._task, completed=self._done)
        if self._shares_screen:
            self._progress.stop()


# Timers of the parts of a step.


class Timers:
    """Sums the seconds of named parts of one thread's work until they are collected.

    Timers nest: the time of an inner timer also counts for the outer one, and a name that is timed
    inside itself counts once. Example::

        with timers.time("total_step_time"):
            with timers.time("forward"):
                ...
        timers.collect()  # {"forward": 0.8, "total_step_time": 1.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block, even if it ends with an exception."""
        if name in self._running:
            yield
            return
        self._running.add(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start
            self._running.remove(name)

    def collect(self) -> dict[str, float]:
        """Return the seconds by name since the last call; a timer counts once it has ended."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

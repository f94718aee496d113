"""Defines a run's position, the metric that ranks its checkpoints, and what ends it early.

A run ends early at a signal, at the end of its time budget, without further tasks, or at a goal or
for want of improvement in a metric. This module does not import torch, so that a wrong name of a
metric is reported quickly.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from laurel.errors import ConfigError
from laurel.observe.metrics import PREFERENCE_METRICS, STEP_METRICS, is_lower_better

if TYPE_CHECKING:
    from laurel.config.grpo import GRPOConfig


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Work = Literal["step", "validation", "save"]

WILL_SAVE = "saving after this step, then ending (again: at once, unsaved)"
"""The message about the effects of the first signal and of the second."""

SAVE_SAFETY = 1.5
"""The factor on the expected time of a save, because the disk may be slower the next time."""
SHARE_IN_RESERVE, LARGEST_RESERVE = 0.1, 60.0
"""The share of the budget, and the maximum seconds, kept for a save until one is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a run: the number of its steps, and the state that decisions depend on."""

    step: int = 0
    bad_steps: int = 0
    """The number of consecutive steps that were not applied."""
    validated_at: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the weights of this step. Older values are dropped, because they could make
    weights the best that were never measured, or whose metrics were not finite.
    """
    before: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the validation before the first step; empty if there was none."""
    best_watched: float | None = None
    """The best value so far of the metric that early stopping watches."""
    num_stale: int = 0
    """The number of validations since that value."""

    def stepped(self, *, bad_steps: int, metrics: Mapping[str, float]) -> Position:
        """Return the position after one more step."""
        return replace(self, step=self.step + 1, bad_steps=bad_steps, metrics=metrics)

    def validated(self, metrics: Mapping[str, float]) -> Position:
        """Return the same position with the metrics of a validation."""
        return replace(
            self,
            validated_at=self.step,
            metrics={**self.metrics, **metrics},
            before=self.before if self.step else metrics,
        )


class NothingLeft(Exception):
    """Raised if there is no further step; the message gives the reason."""


class SignalCount:
    """A count of received signals in memory that forked processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    @property
    def count(self) -> int:
        """The number of received signals, at most two."""
        return self._memory[0]

    def add(self) -> None:
        """Count one more signal, up to two."""
        self._memory[0] = min(self._memory[0] + 1, 255)


_counted: SignalCount | None = None


def count_signals() -> SignalCount:
    """Share one signal count between the `StopRequest`s of this process and of its forks."""
    global _counted
    _counted = SignalCount()
    return _counted


def end_unsaved(status: int) -> NoReturn:
    """End this process immediately with an exit status, and print that it ends unsaved."""
    # The main thread may hold the console's lock, and a live display has hidden the cursor.
    shown = "\x1b[?25h\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{shown}ended unsaved\n".encode())
    os._exit(status)


class StopRequest:
    """A flag that the first signal sets, and that the loop reads between steps.

    A second signal ends the process immediately, without a save. A separate thread receives both,
    because Python's handlers wait until the main thread returns from torch, which takes as long as
    a backward pass.
    """

    has_begun: ClassVar[bool] = False
    """Whether this process has begun to listen for signals, because a run is being set up."""
    receiving: ClassVar[StopRequest | None] = None
    """The request that receives this process's signals, if one does."""

    def __init__(
        self,
        on_signal: Callable[[str], None] = lambda name: None,
        *,
        leave: Callable[[int], object] = end_unsaved,
    ) -> None:
        """Take the callbacks; signals are received while the context is open.

        Args:
            on_signal: Called once, in another thread, with the name of the first signal.
            leave: Called with the exit status at the second signal.
        """
        self.signal: signal.Signals | None = None
        self._heard_at = math.inf
        self._on_signal = on_signal
        self._leave = leave
        self._stack = ExitStack()
        self.before: dict[signal.Signals, Any] = {}
        """The handlers of the signals before, which a fork of this process gets back."""

    def __enter__(self) -> StopRequest:
        StopRequest.has_begun = True
        if threading.current_thread() is threading.main_thread():
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            listener = threading.Thread(target=self._listen, args=(ours,), daemon=True)
            listener.start()
            self._stack.callback(theirs.close)
            self._stack.callback(listener.join)
            # This ends the listener; a close would not, where a fork holds the socket as well.
            self._stack.callback(theirs.shutdown, socket.SHUT_RDWR)
            previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            self._stack.callback(signal.set_wakeup_fd, previous)
            for number in SIGNALS:
                # Without a handler Python would not write signals to the listener.
                previous_handler = signal.signal(number, lambda *_: None)
                self._stack.callback(signal.signal, number, previous_handler)
                self.before[number] = previous_handler
            StopRequest.receiving = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if StopRequest.receiving is self:
            StopRequest.receiving = None
        self._stack.close()

    @property
    def seconds(self) -> float:
        """The seconds since the first signal; 0 if there was none."""
        return max(time.monotonic() - self._heard_at, 0.0)

    def _listen(self, source: socket.socket) -> None:
        # The interpreter writes the numbers of signals to `source` as they arrive.
        with source:
            while numbers := source.recv(16):
                for number in numbers:
                    if number in SIGNALS:
                        self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if _counted is not None:
            _counted.add()
        if self.signal is not None:
            self._leave(128 + number)
            return
        self._heard_at = time.monotonic()
        self.signal = number
        self._on_signal(number.name)


# A signal of a fork is not the run's: the environment that forked it may end it with SIGTERM. Until
# the fork has its own handlers, none reaches it.


class _Forking(threading.local):
    # What a thread that forks blocked before.
    mask: Collection[int] | None = None


_forking = _Forking()


def _before_fork() -> None:
    if StopRequest.receiving is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_in_parent() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
        _forking.mask = None


def _after_in_child() -> None:
    request, StopRequest.receiving = StopRequest.receiving, None
    if request is not None:
        signal.set_wakeup_fd(-1)
        for number, handler in request.before.items():
            signal.signal(number, handler)
    _after_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


class Deadline:
    """The deadline by which a run must have saved its last checkpoint."""

    def __init__(self, budget: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            budget: The time budget as `DD:HH:MM:SS`; None for no limit.
        """
        self._clock = clock
        seconds = math.inf if budget is None else parse_duration(budget)
        self._end = clock() + seconds
        self._longest: dict[Work, float] = {
            "step": 0.0,
            "validation": 0.0,
            "save": min(LARGEST_RESERVE, seconds * SHARE_IN_RESERVE),
        }
        self._seen: set[Work] = set()

    def took(self, work: Work, seconds: float) -> None:
        """Record the duration of a piece of work; the longest of each kind is expected."""
        known = self._longest[work] if work in self._seen else 0.0
        self._longest[work] = max(known, seconds)
        self._seen.add(work)

    def is_near(self, *, before: Collection[Work] = ()) -> bool:
        """Report whether one more step, and the save that must follow it, might end too late.

        Args:
            before: The work that would precede that step.
        """
        to_come = math.fsum(self._longest[work] for work in (*before, "step"))
        return self._clock() + to_come + SAVE_SAFETY * self._longest["save"] >= self._end


def parse_duration(text: str) -> float:
    """Parse `DD:HH:MM:SS` into seconds.

    Raises:
        ConfigError: The text does not have that form.
    """
    match = re.fullmatch(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})", text)
    if match is None:
        raise ConfigError(
            f"checkpointing.checkpoint_must_save_by={text!r} is not of the form DD:HH:MM:SS, "
            "e.g. 00:03:45:00 for three hours and three quarters"
        )
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


NO_SET = "There is no validation set: name one under data"
"""Why a run validates nothing where it has nothing to validate on."""
TRAIN_METRICS = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The metric that ranks checkpoints."""

    key: str | None
    """`validation-<set>_<metric>` or `train_<metric>`; None keeps the most recent checkpoints."""
    higher_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A target of a validation metric that ends the run."""

    key: str
    """The name of the metric, as in `Selection`."""
    threshold: float
    """The value that ends the run when it is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """A validation metric that ends the run when it has not improved for a while."""

    key: str
    """The name of the metric, as in `Selection`."""
    higher_is_better: bool
    patience: int
    """The number of consecutive validations without a new best value that ends the run."""
    min_delta: float
    """The difference to the best value so far that makes a value a new best."""

    def watched(self, position: Position) -> Position:
        """Return a validated position with its best value and the validations since counted."""
        value, best = position.metrics.get(self.key), position.best_watched
        # A metric that could not be measured is no improvement.
        if value is not None:
            gain = math.inf if best is None else value - best
            if best is not None and not self.higher_is_better:
                gain = -gain
            if gain > self.min_delta:
                return replace(position, best_watched=value, num_stale=0)
        if position.step == 0:
            return position  # nothing was trained that could have improved
        return replace(position, num_stale=position.num_stale + 1)


def select_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    sets: Sequence[str],
    attributes: Sequence[str] = (),
    benchmarks: Mapping[str, Sequence[str]] = MappingProxyType({}),
    has_steps: bool = False,
    why_not: str = NO_SET,
    setting: str = "checkpointing.metric_name",
) -> Selection:
    """Resolve `checkpointing.metric_name` to a metric that this run measures.

    `auto` is the loss of the first set or, if there are only benchmarks, the accuracy over all rows
    of the first benchmark. `val_loss`, NeMo RL's name, is the loss of the first set too.

    Args:
        metric_name: The configured name, `validation-<set>_<metric>` or `train_<metric>`, with or
            without the prefix `val:` or `train:`.
        higher_is_better: The configured direction; None derives it from the name.
        why_not: The reason why nothing is validated, for the message, if nothing is.
        setting: The key that names the metric, for the message.

    Raises:
        ConfigError: The run does not measure such a metric; the message lists those it measures.
    """
    if metric_name is None:
        return Selection(key=None)
    if metric_name == "auto":
        if not sets and not benchmarks:
            return Selection(key=None)
        first = f"{sets[0]}_loss" if sets else f"{next(iter(benchmarks))}_accuracy"
        metric_name = f"validation-{first}"
    # The answers of a process reward model have no ranks, so there are no pairs to measure.
    names = ["loss", *STEP_METRICS, "num_nonfinite"] if has_steps else list(PREFERENCE_METRICS)
    names += [f"{kind}/{attribute}" for attribute in attributes for kind in ("mse", "pearson")]
    possible = [f"validation-{name}_{metric}" for name in sets for metric in names]
    possible += [f"validation-{name}_{one}" for name, found in benchmarks.items() for one in found]
    possible += [f"train_{metric}" for metric in TRAIN_METRICS]
    return select_among(
        metric_name,
        higher_is_better,
        possible,
        why_not="" if sets or benchmarks else why_not,
        aliases={"val_loss": f"validation-{sets[0]}_loss"} if sets else {},
        setting=setting,
    )


def select_among(
    metric_name: str,
    higher_is_better: bool | None,
    possible: Sequence[str],
    *,
    why_not: str,
    aliases: Mapping[str, str] = MappingProxyType({}),
    setting: str = "checkpointing.metric_name",
) -> Selection:
    """Resolve a name to one of the metrics that a run measures.

    Args:
        metric_name: The configured name, which is not `auto`.
        higher_is_better: The configured direction; None derives it from the name.
        possible: The names of the metrics that the run measures.
        why_not: The reason why the run validates nothing, for the message; empty if it does.

    Raises:
        ConfigError: The run does not measure such a metric; the message lists those it measures.
    """
    bare = metric_name.removeprefix("val:")
    key = aliases.get(metric_name) or aliases.get(bare) or _in_full(metric_name)
    if key is None or key not in possible:
        raise _never_measured(f"{setting}={metric_name}", possible, why_not=why_not)
    if higher_is_better is None:
        higher_is_better = not is_lower_better(key)
    return Selection(key=key, higher_is_better=higher_is_better)


def _never_measured(setting: str, possible: Iterable[str], *, why_not: str) -> ConfigError:
    hint = f" {why_not}." if why_not else ""
    return ConfigError(
        f"{setting}: this run never measures that.{hint} It can measure: {', '.join(possible)}"
    )


def _in_full(metric_name: str) -> str | None:
    # None where the prefix contradicts the name.
    prefix, colon, name = metric_name.partition(":")
    if not colon:
        return metric_name
    kind = {"val": "validation", "train": "train_"}.get(prefix)
    if kind == "train_" and not name.startswith(kind):
        return f"train_{name}"
    return name if kind is not None and name.startswith(kind) else None


POLICY_METRICS = ("reward_mean", "accuracy", "avg_length", "truncation_rate", "num_failures")
"""The metrics of a policy's validation, by their names without a prefix."""
POLICY_TRAIN_METRICS = ("loss", "reward", "kl_penalty", "entropy", "grad_norm", "truncation_rate")
DEMONSTRATION_METRICS = ("loss", "perplexity")


def select_policy_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    has_validation: bool,
    environments: Sequence[str],
    sets: Sequence[str] = (),
    why_not: str = NO_SET,
) -> Selection:
    """Resolve `checkpointing.metric_name` for GRPO; `auto` is the mean reward in validation.

    A metric of one validation set is named `validation-<set>_reward_mean`. `val_reward` and
    `val:accuracy`, the defaults of NeMo RL, are the mean reward too, because NeMo RL's accuracy is
    the mean of any reward.
    """
    if metric_name is None or (metric_name == "auto" and not has_validation):
        return Selection(key=None)
    possible = [f"train_{name}" for name in POLICY_TRAIN_METRICS]
    if has_validation:
        figures = [f"env/{name}/accuracy" for name in environments]
        named = [f"validation-{name}_{figure}" for name in sets for figure in POLICY_METRICS]
        possible = [f"validation_{name}" for name in (*POLICY_METRICS, *figures)] + named + possible
    mean = "validation_reward_mean"
    aliases = dict.fromkeys(("auto", "val_reward", "val:reward", "val:accuracy"), mean)
    if higher_is_better is None:
        name = aliases.get(metric_name, metric_name).removeprefix("val:")
        for one in sets:  # the name of a set says nothing of its figures
            name = name.removeprefix(f"validation-{one}_")
        higher_is_better = any(word in name for word in ("reward", "accuracy", "entropy"))
    why_not = "" if has_validation else why_not
    return select_among(metric_name, higher_is_better, possible, why_not=why_not, aliases=aliases)


def policy_goal(
    config: GRPOConfig,
    *,
    has_validation: bool,
    environments: Sequence[str],
    why_not: str = NO_SET,
) -> Goal | None:
    """Resolve `grpo.stop_at_validation_metric`, which may omit the prefix of a metric.

    `accuracy` is the mean reward, as in NeMo RL, and NeMo RL's `pass_k` is `pass@k` with the
    number of completions per task in validations.

    Args:
        config: The section `grpo`, whose `stop_at_validation_metric` is the target.
        why_not: The reason why nothing is validated, for the message, if nothing is.

    Raises:
        ConfigError: Validations do not measure the metric, or a higher value is not better.
    """
    metric_name, threshold = config.stop_at_validation_metric, config.stop_at_validation_threshold
    num_generations = config.val_num_generations_per_prompt
    if metric_name is None or threshold is None:
        return None
    names = {"reward_mean": "reward_mean", "accuracy": "reward_mean"}
    names |= {name: name for name in (f"env/{e}/accuracy" for e in environments)}
    if num_generations > 1:
        names |= dict.fromkeys(("pass_k", f"pass@{num_generations}"), f"pass@{num_generations}")
    bare = metric_name.removeprefix("val:").removeprefix("validation_")
    if not has_validation or bare not in names:
        raise _never_measured(
            f"grpo.stop_at_validation_metric={metric_name}",
            names if has_validation else (),
            why_not="" if has_validation else why_not,
        )
    return Goal(key=f"validation_{names[bare]}", threshold=threshold)


def select_demonstrations_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    sets: Sequence[str],
    why_not: str = NO_SET,
) -> Selection:
    """Resolve `checkpointing.metric_name` for fine-tuning; `auto` is the loss of the first set."""
    if metric_name is None or (metric_name == "auto" and not sets):
        return Selection(key=None)
    possible = [f"validation-{s}_{name}" for s in sets for name in DEMONSTRATION_METRICS]
    possible += [f"train_{name}" for name in (*DEMONSTRATION_METRICS, "grad_norm")]
    # Without a set, the first is one of training.
    aliases = {"val_loss": possible[0], "auto": possible[0]} if sets else {}
    why_not = "" if sets else why_not
    return select_among(metric_name, higher_is_better, possible, why_not=why_not, aliases=aliases)

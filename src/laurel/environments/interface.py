"""What an environment is, and the figures that every one reports.

::

    from laurel.environments.interface import EnvironmentInterface, EnvironmentReturn

`protocols.Environment` is the seam that the rollouts see; deriving from `EnvironmentInterface` is
the short way to fit it.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, get_args

from laurel.config.load import check_tree
from laurel.config.schema_info import with_defaults
from laurel.config.yaml_tree import Section, graft
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.observe.hub import line_of
from laurel.protocols import Environment, JudgingUnit, MessageLog
from laurel.types import EnvironmentReturn, Task

if TYPE_CHECKING:
    from laurel.workers.ray_actor import ActorMaker


__all__ = [
    "ConversationMemo",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "RejectedTask",
    "batch_figures",
    "group_id_of",
    "judged_by",
    "mean_of",
    "noise_floor_of",
    "numbers",
    "pass_at_k",
    "response_of",
    "settings_of",
]

T = TypeVar("T")
S = TypeVar("S", bound=Section)

ENVIRONMENT_ROLE = "environment"
"""Role of what an environment says."""
GROUP_ID = "laurel_group_id"
"""Key of the metadata under which rollouts say whose completion a conversation is: the id that
`batch["group_ids"]` has when figures are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTask:
    """A task that its environment could not judge fairly, and why."""

    task: Task
    reason: str


class EnvironmentInterface(ABC):
    """Judges what the policy says. A context manager: leaving it shuts the environment down.

    Every subclass can also live in a process of its own, as an actor of Ray::

        environment = MathEnvironment.remote({"num_workers": 2})
        verdicts = ray.get(environment.step.remote(message_logs, metadata))
        ray.get(environment.shutdown.remote())
    """

    judges: JudgingUnit = "group"
    """What is to come in one call: a completion, a part of a group, a group or a batch."""
    stop_strings: Sequence[str] = ()
    """Where the policy's first turn ends."""
    memo: ConversationMemo[Any] | None = None
    """What it finds out about conversations for its figures, in values that JSON knows."""

    @abstractmethod
    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """See `protocols.Environment.step`."""

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """See `protocols.Environment.global_post_process_and_metrics`."""

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """The tasks whose own reference answer would not earn the reward; here none is checked."""
        return []

    def notes(
        self, message_logs: Sequence[MessageLog], group_ids: Sequence[str] | None = None
    ) -> Any:
        """What figures of these conversations need besides them; see `protocols.Environment`."""
        return None if self.memo is None else self.memo.get_all(message_logs, group_ids)

    def take_notes(
        self,
        message_logs: Sequence[MessageLog],
        notes: Any,
        group_ids: Sequence[str] | None = None,
    ) -> None:
        """The same, from a checkpoint."""
        if self.memo is None:
            return
        ids: Sequence[str | None] = group_ids or [None] * len(message_logs)
        for message_log, note, group_id in zip(message_logs, notes, ids, strict=True):
            if note is not None:
                self.memo.put(message_log, note, group_id)

    def shutdown(self) -> None:  # noqa: B027  many have nothing to free
        """Free processes and memory. Idempotent."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """A Ray actor that holds an environment, at once; the arguments are those of the class.

        Its methods are those of the environment, each as `method.remote(...)`. What goes wrong
        keeps its class, also where the environment could not be made: every call says so. Without
        a connection to Ray, one is made; see `ActorMaker.remote`. The actor ends with its last
        handle, or by `ray.kill`; `shutdown` frees what it holds.

        Raises:
            MissingDependencyError: Ray is not installed.
            TypeError: The class is not made with such arguments.
            ConfigError: The slots for it are not there.
        """
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: Any) -> ActorMaker:
        """Something with the same `remote`, for an actor with options of Ray's.

        Example::

            MathEnvironment.options(num_cpus=2, name="judge").remote({"num_workers": 2})
        """
        from laurel.workers.ray_actor import ActorMaker

        return ActorMaker(cls, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def settings_of(section: type[S], given: S | Mapping[str, Any], *, where: str) -> S:
    """The settings of an environment, from a section or from a plain dictionary.

    Keys of other systems that mean nothing here are left out, and named in the log; an unknown one
    is a `ConfigError` with the nearest known key.

    Args:
        section: What the settings are checked against.
        given: The settings.
        where: What the dictionary is called in messages, e.g. `env.math`.
    """
    if isinstance(given, section):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: must be a {section.__name__} or a dictionary, not {type(given).__name__}"
        )
    made, checker = check_tree(section, with_defaults(section, graft(dict(given), where)))
    for warning in checker.warnings():
        logging.getLogger(__name__).warning("%s: %s", where, warning)
    return made


def group_id_of(metadata: Mapping[str, Any] | None) -> str | None:
    """The group that a conversation belongs to; None where `step` was called without rollouts."""
    return None if metadata is None else metadata.get(GROUP_ID)


def response_of(message_log: MessageLog) -> str:
    """All that the policy said in a conversation, one message after the other."""
    return "".join(m["content"] for m in message_log if m["role"] == "assistant")


class ConversationMemo(Generic[T]):
    """What an environment found out about a conversation, until the figures are made.

    Looked up by what was said and in which group: the same words can answer two tasks with
    different tests, and batches under way at the same time (training, validation) do not mix.
    What was put without a group is found from every group. What was not used for longest goes when
    the memo is full.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._kept: Memory[T] = Memory(capacity)

    def put(self, message_log: MessageLog, value: T, group_id: str | None = None) -> None:
        """Keep `value` for this conversation, in place of what was kept before."""
        self._kept.put(_fingerprint(message_log, group_id), value)

    def forget(self, message_log: MessageLog, group_id: str | None = None) -> None:
        """Keep nothing for this conversation."""
        self._kept.forget(_fingerprint(message_log, group_id))

    def get(self, message_log: MessageLog, group_id: str | None = None) -> T | None:
        """What was kept for this conversation, if it still is."""
        found = self._kept.get(_fingerprint(message_log, group_id))
        if found is None and group_id is not None:  # `step` may have been called by hand
            found = self._kept.get(_fingerprint(message_log, None))
        return found

    def get_all(
        self, message_logs: Sequence[MessageLog], group_ids: Sequence[str] | None
    ) -> list[T | None]:
        """What was kept for each of these conversations. A batch that does not fit is logged."""
        if (count := len(message_logs)) > self._kept.capacity:
            logging.getLogger(__name__).warning(
                "a batch of %s conversations: figures of what was found out about each are of the "
                "last %s of them",
                f"{count:,}",
                f"{self._kept.capacity:,}",
            )
        ids: Sequence[str | None] = group_ids or [None] * len(message_logs)
        return [self.get(one, own) for one, own in zip(message_logs, ids, strict=True)]


def _fingerprint(message_log: MessageLog, group_id: str | None) -> bytes:
    """The same before and after the environment's own words are added."""
    digest = blake2b(digest_size=16)
    said = [m for m in message_log if m["role"] != ENVIRONMENT_ROLE]
    texts = [text for message in said for text in (message["role"], message["content"])]
    # An odd number of texts has a group, an even number has none.
    for text in texts if group_id is None else [group_id, *texts]:
        written = text.encode("utf-8", "surrogatepass")
        digest.update(len(written).to_bytes(8, "little"))
        digest.update(written)
    return digest.digest()


def judged_by(environment: Environment) -> JudgingUnit:
    """What an environment judges in one call.

    Raises:
        ConfigError: It says something else.
    """
    found = getattr(environment, "judges", "group")
    if found not in get_args(JudgingUnit):
        known = ", ".join(get_args(JudgingUnit))
        raise ConfigError(f"{type(environment).__name__}: judges={found!r} must be one of {known}")
    return cast(JudgingUnit, found)


def noise_floor_of(environment: Environment) -> float:
    """Standard deviation of the noise in an environment's rewards; 0 where it names none."""
    return float(getattr(environment, "noise_floor", 0.0))


# ------------------------------------------------------------------------------------------ figures


def batch_figures(batch: Mapping[str, Any]) -> dict[str, float]:
    """What every environment can say of a finished batch. A mean over nothing is absent."""
    figures = {
        "num_samples": float(len(batch["group_ids"])),
        "num_problems_in_batch": float(len(set(batch["group_ids"]))),
        "num_failures": float(batch.get("num_failures", 0)),
    }
    means = {
        "fraction_of_samples_properly_ended": batch["is_end"],
        "generation_lengths": batch["generation_lengths"],
        "prompt_lengths": batch["prompt_lengths"],
    }
    for name, values in means.items():
        figures |= mean_of(name, numbers(values))
    return figures


def mean_of(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean under its name, or nothing where there are no values."""
    return {name: math.fsum(values) / len(values)} if values else {}


def numbers(values: Any) -> list[float]:
    """The entries of a tensor, an array or a list, as plain floats."""
    return [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def pass_at_k(group_ids: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """How often k tries would solve a problem.

    `pass@samples_per_prompt` is the share of groups with a correct sample. `pass@1`, `pass@2`,
    `pass@4`, ... up to the smallest group are the unbiased estimates `1 - C(n-c, k) / C(n, k)` from
    n samples of which c are correct.
    """
    outcomes: dict[str, list[bool]] = {}
    for group_id, one in zip(group_ids, correct, strict=True):
        outcomes.setdefault(group_id, []).append(one)
    if not outcomes:
        return {}
    tries = [(len(group), sum(group)) for group in outcomes.values()]
    figures = mean_of("pass@samples_per_prompt", [float(c > 0) for _, c in tries])
    for k in _powers_of_two(min(n for n, _ in tries)):
        solved = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in tries]
        figures |= mean_of(f"pass@{k}", solved)
    return figures


def _powers_of_two(largest: int) -> Iterable[int]:
    return (1 << exponent for exponent in range(largest.bit_length()))


# --------------------------------------------------------------------------------------------------
# What was found out before, up to a number of things.


class Memory(Generic[T]):
    """Values by key. What was not used for longest goes when it is full.

    Safe to use from several threads at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: bytes, value: T) -> None:
        """Keep a value, in place of what was kept before."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Keep nothing under this key."""
        with self._lock:
            self._kept.pop(key, None)

    def get(self, key: bytes) -> T | None:
        """What was kept under this key, if it still is."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


# --------------------------------------------------------------------------------------------------
# The check of what an environment returned. Users write environments: an error names the class, the
# file and the line of the one that returned something else.

FIELDS = ("observations", "metadata", "next_stop_strings")
MAY_MISS = ("answers", "failures")


def source_of(called: Callable[..., Any]) -> tuple[str, int] | None:
    """File and first line of a function; None where it is not written in Python."""
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def method_name(called: Callable[..., Any]) -> str:
    """A method as its author knows it: `module.Class.step (FILE:LINE)`."""
    owner = getattr(called, "__self__", None)
    where = source_of(called)
    kind = type(owner)
    name = getattr(called, "__name__", "step")
    said = f"{kind.__module__}.{kind.__qualname__}.{name}" if owner is not None else name
    return said if where is None else f"{said} ({line_of(*where)})"


def unfit(called: Callable[..., Any], returned: str, expected: str) -> EnvironmentFailedError:
    """The error for a function that returned something that cannot be used."""
    return EnvironmentFailedError(
        f"{method_name(called)} returned {returned}; expected is {expected}"
    )


def checked_return(step: Callable[..., Any], returned: Any, size: int) -> EnvironmentReturn:
    """What `step` returned, if it is a verdict on `size` conversations.

    Whether each reward is finite is not looked at: one that is not is the failure of its sample.

    Raises:
        EnvironmentFailedError: It is no verdict; says whose, what it is, and what is expected.
    """
    of_each = f"one for each of {size} conversations"
    if not isinstance(returned, EnvironmentReturn):
        raise unfit(step, value_kind(returned), f"an EnvironmentReturn with a reward, {of_each}")
    if isinstance(returned.rewards, Mapping) and not returned.rewards:
        raise unfit(step, "rewards without any component", f"a tensor of rewards, {of_each}")
    for name in FIELDS + MAY_MISS:
        given: Any = getattr(returned, name)
        if given is None and name in MAY_MISS:
            continue
        if not isinstance(given, Sized) or len(given) != size:
            count = (
                f"{len(given)} {name}"
                if isinstance(given, Sized)
                else (f"{value_kind(given)} as {name}")
            )
            raise unfit(step, count, f"a list, {of_each}")
    for name, values in reward_columns(returned).items():
        column_of(step, values, size, name)
    return returned


def reward_columns(returned: EnvironmentReturn) -> dict[str, Any]:
    """The numbers of a verdict by what to call them: every component of the reward, and the end."""
    rewards = returned.rewards
    if isinstance(rewards, Mapping):
        named = {f"rewards[{name!r}]": values for name, values in rewards.items()}
    else:
        named = {"rewards": rewards}
    return {**named, "terminateds": returned.terminateds}


def column_of(step: Callable[..., Any], values: Any, size: int, name: str) -> list[Any]:
    """A number for each conversation, as plain numbers.

    Raises:
        EnvironmentFailedError: It is something else.
    """
    import torch

    expected = f"a tensor of shape [{size}], one for each of {size} conversations"
    try:
        column = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unfit(step, f"{value_kind(values)} as {name}", expected) from error
    if column.ndim == 1 and len(column) != size:
        raise unfit(step, f"{len(column)} {name}", expected)
    if column.ndim != 1:
        raise unfit(step, f"{name} of shape {list(column.shape)}", expected)
    plain: list[Any] = column.tolist()
    return plain


def value_kind(value: Any) -> str:
    """What a value is, in few words."""
    if value is None:
        return "None"
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {name} of {len(value)}"
    return f"a {name}"

"""Defines the base class of environments, and the metrics that all of them report.

::

    from laurel.environments.interface import EnvironmentInterface, EnvironmentReturn

`protocols.Environment` is the protocol that rollouts use; a subclass of `EnvironmentInterface`
implements it with little code.
"""

from __future__ import annotations

import ast
import inspect
import logging
import math
import textwrap
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from laurel.config.grpo_run import GRPORun
from laurel.config.load import check_tree, tried
from laurel.config.other_systems import translate
from laurel.config.schema_info import with_defaults
from laurel.config.yaml_tree import Section, YamlNode, find_node, graft, with_key
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.observe.user_code import error_with_line, line_of
from laurel.protocols import Environment, MessageLog
from laurel.types import (
    IS_VALIDATION,
    PROMPT_MESSAGES,
    EnvironmentReturn,
    EnvironmentSpec,
    RejectedTask,
    Task,
)

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.workers.ray_actor import ActorMaker


__all__ = [
    "EnvironmentInterface",
    "EnvironmentReturn",
    "EnvironmentSpec",
    "RejectedTask",
    "accuracy_metrics",
    "batch_metrics",
    "close_quietly",
    "mean_of",
    "numbers",
    "pass_at_k",
    "response_of",
    "settings_of",
]

T = TypeVar("T")
S = TypeVar("S", bound=Section)

ENVIRONMENT_ROLE = "environment"
"""The role of an environment's messages."""
GROUP_ID = "laurel_group_id"
"""The metadata key of the id of a conversation's group, which `batch["group_ids"]` has in the
finished batch.
"""
CONVERSATION_ID = "laurel_conversation_id"
"""The metadata key of a conversation's own id, which no other conversation ever has."""
IDS = (GROUP_ID, CONVERSATION_ID)
OF_ROLLOUT = (*IDS, PROMPT_MESSAGES, IS_VALIDATION)
"""The metadata keys that rollouts set, beside those of the task."""


class EnvironmentInterface(ABC):
    """Scores completions of a policy; leaving it as a context manager shuts it down.

    Every subclass can also run in its own process, as a Ray actor::

        environment = MathEnvironment.remote({"num_workers": 2})
        verdicts = ray.get(environment.step.remote(message_logs, metadata))
        ray.get(environment.shutdown.remote())
    """

    spec = EnvironmentSpec()
    """The properties of the environment, which a class or an object may set to others than the
    defaults.
    """

    @abstractmethod
    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Score conversations, as `protocols.Environment.step` describes."""

    def close_conversations(  # noqa: B027  most keep nothing
        self, metadata: Sequence[dict[str, Any] | None]
    ) -> None:
        """Free what is kept for conversations that it has not ended, as in `Environment`."""

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Return a finished batch and its metrics, as `protocols.Environment` describes."""

    def end_batch(self, batch: Mapping[str, Any]) -> None:  # noqa: B027  most have no state
        """Update the state from a batch that was trained on, as in `protocols.Environment`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, if `spec.has_state`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  most have no state
        """Restore a saved state, if `spec.has_state`."""

    def noise_floor(self) -> float:
        """Return the standard deviation of the rewards' noise, which `spec` gives; 0 by default."""
        return self.spec.noise_floor or 0.0

    def step_noise_floor(self) -> float:
        """Return the same of the rewards of steps; by default it is that of the rewards."""
        return self.noise_floor()

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """Return the tasks whose reference answer would not earn the reward; by default none."""
        return []

    def use_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027  few depend on the template
        """Take the policy's tokenizer before the first rollout, as in `protocols.Environment`."""

    def resting(self) -> AbstractContextManager[None]:
        """Free device memory while the context is open; by default there is nothing to free."""
        return nullcontext()

    def shutdown(self) -> None:  # noqa: B027  many have nothing to free
        """Free processes and memory; further calls do nothing."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a Ray actor that holds an environment; the arguments are those of the class.

        The actor has the methods of the environment, each as `method.remote(...)`. Errors keep
        their class; if the environment could not be created, every call raises its error. Without a
        connection to Ray, this connects, as `ActorMaker.remote` describes. The actor ends with its
        last handle, or by `ray.kill`; `shutdown` frees what it holds.

        Raises:
            MissingDependencyError: Ray is not installed.
            TypeError: The class does not accept these arguments.
            ConfigError: There are not enough slots.
        """
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: Any) -> ActorMaker:
        """Return an object with the same `remote`, which creates actors with options of Ray.

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


def close_quietly(environment: Environment, metadata: Sequence[dict[str, Any] | None]) -> None:
    """Call `close_conversations`; its error becomes a warning, since the rewards are not at fault.

    Args:
        environment: The environment, or a part of a composite.
        metadata: Metadata of the conversations; without any there is no call.
    """
    try:
        if metadata:
            environment.close_conversations(metadata)
    except Exception as error:  # an environment's own code: anything can come out of it
        logging.getLogger(__name__).warning(
            "%s has not closed %d conversations: %s",
            method_name(environment.close_conversations),
            len(metadata),
            error_with_line(error),
        )


def settings_of(section: type[S], given: S | Mapping[str, Any], *, where: str) -> S:
    """Read the settings of an environment from a section or a plain dictionary.

    It is read as that section of a run's file is: keys of other systems that have no effect here
    are ignored, with a warning in the log, and those that ask for what Laurel lacks are refused. An
    unknown key is a `ConfigError` that names the most similar known key. `where` is the place of
    the section, e.g. `env.math`.
    """
    if isinstance(given, section):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: must be a {section.__name__} or a dictionary, not {type(given).__name__}"
        )
    read = graft(dict(given), where)
    made, checker = tried(section, with_defaults(section, read))
    if made is None or checker.ignored:
        place, problems = where.split("."), list[str]()
        run = with_key(YamlNode({}, where), place, read)
        adapted = find_node(translate(GRPORun, run, problems).tree, place)
        assert adapted is not None
        made, checker = check_tree(section, with_defaults(section, adapted), problems)
    for warning in checker.warnings():
        logging.getLogger(__name__).warning("%s: %s", where, warning)
    return made


def response_of(message_log: MessageLog) -> str:
    """Return the joined text of all messages of the policy in a conversation."""
    return "".join(m["content"] for m in message_log if m["role"] == "assistant")


def last_answer(message_log: MessageLog) -> str:
    """Return the text of the policy's last message; empty if there is none."""
    answers = (m["content"] for m in reversed(message_log) if m["role"] == "assistant")
    return next(answers, "")


def cut_middle(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than the limit, for a policy to read."""
    text = text.encode("utf-8", "replace").decode()  # no tokenizer takes unpaired surrogates
    if len(text) <= most:
        return text
    half = most // 2
    left_out = f"\n[... {len(text) - 2 * half} characters left out ...]\n"
    return text[:half] + left_out + text[-half:]


def batch_metrics(batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the common metrics of a finished batch; a mean over nothing is absent."""
    metrics = {
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
        metrics |= mean_of(name, numbers(values))
    return metrics


def accuracy_metrics(
    batch: Mapping[str, Any], *, right: float = 1.0
) -> tuple[dict[str, float], list[bool]]:
    """Return the common metrics with `accuracy` and `pass@...`, and which completions are correct.

    A completion is correct if its reward is at least `right` and it was not truncated.
    """
    samples = zip(numbers(batch["rewards"]), numbers(batch["is_end"]), strict=True)
    correct = [reward >= right and end > 0 for reward, end in samples]
    figures = batch_metrics(batch) | mean_of("accuracy", [float(one) for one in correct])
    return figures | pass_at_k(batch["group_ids"], correct), correct


def mean_of(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean under its name; empty if there are no values."""
    return {name: math.fsum(values) / len(values)} if values else {}


def numbers(values: Any) -> list[float]:
    """Return the entries of a tensor, an array or a list as plain floats."""
    return [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def pass_at_k(group_ids: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """Estimate how often at least one of k completions would be correct.

    `pass@samples_per_prompt` is the share of groups with a correct completion. `pass@1`, `pass@2`,
    `pass@4`, ... up to the size of the smallest group are the unbiased estimates
    `1 - C(n-c, k) / C(n, k)` from n completions of which c are correct.
    """
    outcomes: dict[str, list[bool]] = {}
    for group_id, one in zip(group_ids, correct, strict=True):
        outcomes.setdefault(group_id, []).append(one)
    if not outcomes:
        return {}
    tries = [(len(group), sum(group)) for group in outcomes.values()]
    metrics = mean_of("pass@samples_per_prompt", [float(c > 0) for _, c in tries])
    smallest = min(n for n, _ in tries)
    for k in (1 << exponent for exponent in range(smallest.bit_length())):
        solved = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in tries]
        metrics |= mean_of(f"pass@{k}", solved)
    return metrics


# A cache of limited size.


class Memory(Generic[T]):
    """A thread-safe cache that evicts the least recently used value when it is full."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: bytes, value: T) -> None:
        """Store a value, replacing any earlier one."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)

    def get(self, key: bytes) -> T | None:
        """Return the stored value of a key, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


# Validation of an environment's return value. Users write environments: an error names the class,
# the file and the line of the one that returned something else.

FIELDS = ("observations", "metadata", "next_stop_strings")
MAY_MISS = ("answers", "failures", "notes", "steps", "components", "invalid_calls")


def source_of(called: Callable[..., Any]) -> tuple[str, int] | None:
    """Return the file and the first line of a function; None if it is not written in Python."""
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def method_name(called: Callable[..., Any]) -> str:
    """Return the name of a method for its author: `module.Class.step (FILE:LINE)`."""
    owner = getattr(called, "__self__", None)
    where = source_of(called)
    kind = type(owner)
    name = getattr(called, "__name__", "step")
    full = f"{kind.__module__}.{kind.__qualname__}.{name}" if owner is not None else name
    return full if where is None else f"{full} ({line_of(*where)})"


def other_return(step: Callable[..., Any]) -> str | None:
    """Return where the source of `step` returns a tuple, such as NeMo RL's, and of what.

    So one is refused before the first rollouts. None: its source is not there, or the values that
    it returns are not seen in it; they are checked when they come.
    """
    function = inspect.unwrap(getattr(step, "__func__", step))
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    nodes = list(_nodes_of(tree.body[0]))
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(ast.unparse(target), []).append(node.value)
    for node in nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            values = assigned.get(ast.unparse(node.value), [])
            made = values[0] if len(values) == 1 else node.value
            if (kind := _tuple_in(made, getattr(function, "__globals__", {}))) is not None:
                file, _ = source_of(function) or ("", 0)
                return f"{line_of(file, first + node.lineno - 1)} returns {kind}"
    return None


def _nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield child
            yield from _nodes_of(child)


def _tuple_in(value: ast.expr, known: Mapping[str, Any]) -> str | None:
    """Describe a tuple that is no `EnvironmentReturn`; None if the value is not seen to be one."""
    if isinstance(value, ast.Tuple):
        return f"a tuple of {len(value.elts)}"
    made = known.get(ast.unparse(value.func)) if isinstance(value, ast.Call) else None
    if made is tuple or not isinstance(made, type) or issubclass(made, EnvironmentReturn):
        return None
    return f"a {made.__module__}.{made.__qualname__}" if issubclass(made, tuple) else None


def invalid_return(
    called: Callable[..., Any], returned: str, expected: str
) -> EnvironmentFailedError:
    """Return the error for a function that returned an invalid value."""
    return EnvironmentFailedError(
        f"{method_name(called)} returned {returned}; expected is {expected}"
    )


class CheckedReturn(NamedTuple):
    """What `step` returned, with its numbers as plain ones."""

    returned: EnvironmentReturn
    rewards: dict[str, list[float]]
    """The rewards by component; one column called "" where they have no components."""
    terminateds: list[Any]


def checked_return(step: Callable[..., Any], returned: Any, size: int) -> CheckedReturn:
    """Validate what `step` returned for `size` conversations, and convert its numbers.

    Raises:
        EnvironmentFailedError: The value is invalid; the message names the method, the value, and
            what is expected.
    """
    of_each = f"one for each of {size} conversations"
    if not isinstance(returned, EnvironmentReturn):
        raise invalid_return(
            step, value_kind(returned), f"an EnvironmentReturn with a reward, {of_each}"
        )
    if isinstance(returned.rewards, Mapping) and not returned.rewards:
        raise invalid_return(
            step, "rewards without any component", f"a tensor of rewards, {of_each}"
        )
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
            raise invalid_return(step, count, f"a list, {of_each}")
    # Whether each reward is finite is not checked: a reward that is not is the failure of its
    # sample.
    rewards = returned.rewards if isinstance(returned.rewards, Mapping) else {"": returned.rewards}
    return CheckedReturn(
        returned,
        {
            name: _column(step, values, size, f"rewards[{name!r}]" if name else "rewards")
            for name, values in rewards.items()
        },
        _column(step, returned.terminateds, size, "terminateds"),
    )


def _column(step: Callable[..., Any], values: Any, size: int, name: str) -> list[Any]:
    """Convert a column to one plain number for each conversation.

    Raises:
        EnvironmentFailedError: The value is not such a column.
    """
    import torch

    expected = f"a tensor of shape [{size}], one for each of {size} conversations"
    try:
        column = precise(torch.as_tensor(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise invalid_return(step, f"{value_kind(values)} as {name}", expected) from error
    if column.ndim == 1 and len(column) != size:
        raise invalid_return(step, f"{len(column)} {name}", expected)
    if column.ndim != 1:
        raise invalid_return(step, f"{name} of shape {list(column.shape)}", expected)
    plain: list[Any] = column.tolist()
    return plain


def precise(values: Tensor) -> Tensor:
    """Return numbers of an environment in float64, float32 as the shortest decimals they stand for.

    So a float32 of 0.7 equals a float64 of 0.7, and sums of rewards round in float64 alone.
    """
    import torch

    if values.dtype == torch.float32:
        decimals = [float(str(value)) for value in values.detach().cpu().numpy().flat]
        return torch.tensor(decimals, dtype=torch.float64).reshape(values.shape)
    return values if values.dtype == torch.bool else values.double()


def value_kind(value: Any) -> str:
    """Return a description of the type of a value in a few words."""
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

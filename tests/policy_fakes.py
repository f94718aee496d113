"""A generator and environments without any model, for everything that plays tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from laurel.environments.interface import EnvironmentInterface
from laurel.extensions.math.environment import MathEnvironment
from laurel.grpo.rollouts import RolloutLimits, Rollouts
from laurel.types import (
    Conversation,
    EnvironmentReturn,
    EnvironmentSpec,
    Generated,
    GenerationRequest,
    JudgingUnit,
    Message,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepReward,
    Task,
    Weights,
    messages_of,
)

SAMPLING = SamplingParams(max_new_tokens=8)


def ids_of(text: str) -> Any:
    """A text as the fakes' tokens: its bytes."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


class ByteChat:
    """A chat format in which every byte is a token; a prompt ends with `>`."""

    def __init__(self) -> None:
        self.histories: list[Conversation] = []

    def prompt_ids(self, conversation: Conversation, /, *, tools: Any = ()) -> Any:
        return ids_of("".join(m.content for m in conversation) + ">")

    def observation_ids(
        self, observation: Any, /, *, history: Conversation, turn_ids: Any, tools: Any = ()
    ) -> Any:
        self.histories.append(history)
        said = "".join(message["content"] for message in messages_of(observation))
        return ids_of(f"[{said}]>")

    def rewritten_ids(
        self, observation: Any, /, *, history: Conversation, turn: Message, tools: Any = ()
    ) -> Any:
        return None

    def control_token_in(self, text: str, /) -> str | None:
        return "</s>" if "</s>" in text else None

    def token_ends(self, turn_ids: Any, text: str, ends: Sequence[int], /) -> list[int]:
        return [len(turn_ids) if end >= len(text) else len(text[:end].encode()) for end in ends]

    def text_of(self, turn_ids: Any, /) -> str:
        return bytes(turn_ids.astype(np.uint8)).decode()


@dataclass(frozen=True)
class Say:
    """One completion as it is scripted."""

    text: str
    finish_reason: Any = "stop"
    after: Callable[[], bool] | None = None
    """It ends once this is so."""
    ids: Any = None


@dataclass
class ScriptedGenerator:
    """Says what the script says, completion by completion in the script's order.

    A script is called with a request and gives pairs of an index and what it says; an exception in
    it is raised, `None` waits for ever.
    """

    script: Callable[[GenerationRequest], Sequence[Any]]
    requests: list[GenerationRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    weight_version: int = 0
    updates: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        self.requests.append(request)
        self.open.add(request.id)
        try:
            for item in self.script(request):
                await asyncio.sleep(0)
                if item is None:
                    await asyncio.Event().wait()
                if isinstance(item, BaseException):
                    raise item
                index, said = item
                while said.after is not None and not said.after():
                    await asyncio.sleep(0.001)
                ids_L = ids_of(said.text) if said.ids is None else said.ids
                self.events.append(f"said {request.id} {index}")
                yield Generated(
                    index=index,
                    ids_L=ids_L,
                    logprobs_L=np.full(len(ids_L), -0.5, dtype=np.float32),
                    text=said.text,
                    finish_reason=said.finish_reason,
                    weight_version=self.weight_version,
                )
        finally:
            self.open.discard(request.id)

    def end_conversations(self, names: Sequence[str]) -> None:
        self.ended += names

    async def update_weights(self, weights: Weights) -> None:
        assert not self.open, "weights changed in the middle of a request"
        self.weight_version = weights.version
        self.updates.append(weights.version)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


def saying(*texts: str) -> Callable[[GenerationRequest], list[Any]]:
    """A script in which completion `i` of every request says text `i` (again from the first)."""
    return lambda request: [(i, Say(texts[i % len(texts)])) for i in range(len(request.seeds_G))]


class Judge(EnvironmentInterface):
    """Judges by a function of the latest answer and the metadata; remembers its calls.

    The verdict is a dictionary: `reward` (or `rewards`, named), `over`, `observation`, `stops`,
    `metadata`, `failure`, `answer`, `note`, `steps`, `invalid`, `parts`.
    """

    def __init__(
        self,
        verdict: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda text, metadata: {},
        *,
        judges: JudgingUnit = "group",
        stop_strings: Sequence[str] = (),
        noise: float = 0.0,
        before: Callable[[list[str]], None] = lambda texts: None,
    ) -> None:
        self.verdict = verdict
        self.spec = EnvironmentSpec(
            judges=judges, stop_strings=tuple(stop_strings), noise_floor=noise
        )
        self.before = before
        self.calls: list[list[str]] = []
        self.logs: list[Any] = []
        self.metadata: list[Any] = []
        self.closed: list[Any] = []
        self.batches: list[Mapping[str, Any]] = []

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        texts = [log[-1]["content"] for log in message_log_batch]
        self.calls.append(texts)
        self.logs += message_log_batch
        self.metadata += metadata
        self.before(texts)
        verdicts = [self.verdict(t, m or {}) for t, m in zip(texts, metadata, strict=True)]
        parts = verdicts[0].get("rewards")
        if parts is None:
            rewards: Any = torch.tensor([float(v.get("reward", 1.0)) for v in verdicts])
        else:
            rewards = {n: torch.tensor([float(v["rewards"][n]) for v in verdicts]) for n in parts}
        return EnvironmentReturn(
            observations=[
                v.get("observation", {"role": "user", "content": "ok"}) for v in verdicts
            ],
            metadata=[v.get("metadata", m) for v, m in zip(verdicts, metadata, strict=True)],
            next_stop_strings=[v.get("stops") for v in verdicts],
            rewards=rewards,
            terminateds=torch.tensor([v.get("over", True) for v in verdicts]),
            answers=[v.get("answer") for v in verdicts],
            failures=[v.get("failure") for v in verdicts],
            notes=[v.get("note") for v in verdicts],
            steps=[v.get("steps") for v in verdicts],
            invalid_calls=[v.get("invalid", False) for v in verdicts],
            components=[v["parts"] for v in verdicts] if "parts" in verdicts[0] else None,
        )

    def close_conversations(self, metadata: Sequence[Any]) -> None:
        self.closed += metadata

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        self.batches.append(batch)
        return batch, {"seen": float(len(batch["rewards"]))}

    def shutdown(self) -> None: ...


def task(
    text: str = "q", *, name: str = "judge", task_id: str | None = None, **metadata: Any
) -> Task:
    return Task(
        id=task_id or text, prompt=(Message("user", text),), environment=name, metadata=metadata
    )


def rollout(text: str, reward: float | None, **changes: Any) -> Rollout:
    """What was said in one turn; each `.` is a token of the environment's."""
    values: dict[str, Any] = {
        "messages": (Message("assistant", text),),
        "ids_L": ids_of(text),
        "mask_L": np.array([c != "." for c in text]),
        "logprobs_L": np.zeros(len(text), dtype=np.float32),
        "reward": reward,
        "failure": "broken" if reward is None else None,
    }
    return Rollout(**(values | changes))


def rollout_group(
    *rollouts: Rollout,
    prompt: str = "abc",
    name: str = "judge",
    greedy: Rollout | None = None,
    **metadata: Any,
) -> RolloutGroup:
    asked = task(prompt, name=name, **metadata)
    return RolloutGroup(
        id=f"g-{prompt}",
        task=asked,
        prompt_ids=ids_of(prompt),
        rollouts_G=rollouts,
        greedy=greedy,
    )


OF_ROLLOUTS = ("seed", "per_step", "tree", "devices")


def rollouts_of(generator: ScriptedGenerator, **options: Any) -> Rollouts:
    """With one environment called `judge`, unless `environments` are given."""
    judge = options.pop("judge", None)
    environments = options.pop("environments", None) or {"judge": judge or Judge()}
    chat = options.pop("chat", None) or ByteChat()
    whole = {"seed": 7} | {k: options.pop(k) for k in OF_ROLLOUTS if k in options}
    limits = RolloutLimits(**({"max_turns": 1, "max_length": 64} | options))
    return Rollouts(generator, environments, chat, limits, **whole)


HOOKS: dict[str, Callable[[], None]] = {}
"""What `Matches` calls before it judges (`judge`), and `HookedAdamW` before it steps (`update`)."""


class Matches(Judge):
    """Gives `reward` to an answer that has the known one in it; the `poison` is a failure."""

    def __init__(
        self, *, poison: str | None = None, reward: float = 1.0, noise: float = 0.0
    ) -> None:
        def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
            if poison is not None and poison in text:
                return {"failure": f"{poison!r} is poison"}
            return {"reward": reward * (str(metadata["ground_truth"]) in text), "answer": text}

        super().__init__(
            verdict, noise=noise, before=lambda texts: HOOKS.get("judge", lambda: None)()
        )


class Served(Matches):
    """As if a model that has the policy's devices judged; `EVENTS` are all that happens to it."""

    EVENTS: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, rests=True)
        self.before = lambda texts: self.EVENTS.append("score")

    @contextmanager
    def resting(self) -> Iterator[None]:
        self.EVENTS.append("models sleep")
        try:
            yield
        finally:
            self.EVENTS.append("models wake")

    def shutdown(self) -> None:
        self.EVENTS.append("models end")


class HookedAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        HOOKS.get("update", lambda: None)()
        return super().step(closure)


class Shouts(EnvironmentInterface):
    """Asks everybody twice, and rewards both answers, never with 0 or 1."""

    spec = EnvironmentSpec(judges="completion")

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        over = [sum(m["role"] == "assistant" for m in log) > 1 for log in message_log_batch]
        right = [
            str(m["ground_truth"]) in log[-1]["content"]
            for log, m in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": "again"}] * len(over),
            metadata=list(metadata),
            next_stop_strings=[None] * len(over),
            rewards=torch.tensor([0.25 + 0.1 * r for r in right]),
            terminateds=torch.tensor(over),
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        return batch, {"mean_length": float(batch["generation_lengths"].double().mean())}

    def shutdown(self) -> None: ...


class Uneven(Matches):
    """Gives as much as float32 holds where the known answer is 2."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        found = super().step(message_log_batch, metadata)
        sizes = [3e38 if str(m["ground_truth"]) == "2" else 1.0 for m in metadata]
        return found._replace(rewards=found.rewards * torch.tensor(sizes))


class DigitSteps(Matches):
    """Also rewards each character that is a digit, as the end of a step, and the end."""

    def __init__(self, *, noise: float = 0.0, step_noise: float = 0.0) -> None:
        super().__init__(noise=noise)
        self.spec = replace(self.spec, gives_steps=True)
        self._step_noise = step_noise

    def step_noise_floor(self) -> float:
        return self._step_noise

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        given = super().step(message_log_batch, metadata)
        steps = []
        for log in message_log_batch:
            text = log[-1]["content"]
            ends = [i + 1 for i, c in enumerate(text[:-1]) if c.isdigit()]
            steps.append([StepReward(end, len(text) / end) for end in (*ends, len(text)) if end])
        return given._replace(steps=steps)


class MathCopy(MathEnvironment):
    """The environment for mathematics, under a name of its own."""

    def __init__(self) -> None:
        super().__init__({"num_workers": 1})


class Fades(Matches):
    """Gives nothing to anybody after so many calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._limit = calls

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        found = super().step(message_log_batch, metadata)
        fades = len(self.calls) > self._limit
        return found._replace(rewards=found.rewards * 0) if fades else found


class Tires(Matches):
    """Gives less and less, by how many samples were learned from; checkpoints hold the number."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, has_state=True)
        self.num_learned = 0

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        found = super().step(message_log_batch, metadata)
        return found._replace(rewards=found.rewards / (1 + self.num_learned))

    def end_batch(self, batch: Mapping[str, Any]) -> None:
        self.num_learned += len(batch["rewards"])

    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.num_learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_learned = state["learned"]


class RemoteMath(EnvironmentInterface):
    """A math environment in an actor of Ray, which is killed after so many batches."""

    spec = EnvironmentSpec(judges="batch")

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._left = int((config or {}).get("batches", 1))
        self._actor = MathEnvironment.remote({"num_workers": 1})

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        import ray

        self._left -= 1
        if self._left < 0:
            ray.kill(self._actor)
        judged: EnvironmentReturn = ray.get(self._actor.step.remote(message_log_batch, metadata))
        return judged

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


class Told(EnvironmentInterface):
    """Rewards answers that come after a tool has told a digit."""

    spec = EnvironmentSpec(judges="completion")

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        told = [
            any(m["role"] == "tool" and m["content"].isdigit() for m in log)
            for log in message_log_batch
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in told],
            metadata=list(metadata),
            next_stop_strings=[None for _ in told],
            rewards=torch.tensor(told, dtype=torch.float32),
            terminateds=torch.ones(len(told), dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}

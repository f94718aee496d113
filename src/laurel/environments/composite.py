"""Combines several environments that score the same completions."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from laurel.config.environments import CompositeEnvironmentConfig
from laurel.environments.interface import (
    OF_ROLLOUT,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    RejectedTask,
    batch_metrics,
    checked_return,
    close_quietly,
    mean_of,
    numbers,
    precise,
    settings_of,
)
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.protocols import Environment, MessageLog
from laurel.types import JudgingUnit, Task, messages_of
from laurel.workers.threads import CallEnd, begin_in_thread

GATE = "gate"
"""The name of the component that changes a rejected completion's reward to `gated_reward`."""
OF_PARTS = "composite_parts"
"""The metadata key of the parts' own metadata, if the conversation goes on."""
SO_FAR = "composite_rewards"
"""The metadata key of the rewards that each part gave in earlier turns."""


class CompositeEnvironment(EnvironmentInterface):
    """Lets all parts score every completion concurrently, and adds up the rewards.

    The reward is the sum of named components: `weight * reward` of each part without a gate, under
    the part's name (`part/component` if the part itself names components).

    - With `as_components` (for GDPO), if a gate rejects a completion, each component is an even
    share of `gated_reward`, so that no part alone can raise the reward.
    - Otherwise components are unchanged, and the component `gate`, which exists if any part has a
    gate, is the difference to `gated_reward`.

    If a part fails on a completion, the completion is a failure, unless the part neither counts
    (weight 0) nor gates. A conversation is over as soon as one part says so, and must not be scored
    again. With a conductor (`conducted_by`), only that part says so, and the others score then.
    """

    def __init__(
        self,
        config: CompositeEnvironmentConfig | Mapping[str, Any],
        environments: Mapping[str, Environment],
    ) -> None:
        """Combine environments, which are shut down with this one.

        Raises:
            ConfigError: A part names an environment that does not exist, or no part gives a reward.
        """
        self.config = settings_of(CompositeEnvironmentConfig, config, where="env.composite")
        names = list(dict.fromkeys(part.env for part in self.config.parts))
        unknown = [name for name in names if name not in environments]
        if unknown:
            raise ConfigError(
                f"env.composite: no environment is called {', '.join(unknown)}; "
                f"there are {', '.join(environments)}"
            )
        self._added = [part for part in self.config.parts if part.gate is None]
        self._gates = [(p.env, p.gate) for p in self.config.parts if p.gate is not None]
        # Their rewards are in no component; `observe.history.gold_metric` reads their mean metrics.
        self._watched = {part.env for part in self._added if part.weight == 0.0}
        if not self._added:
            raise ConfigError("env.composite: all parts are gates; one must give the reward")
        if len({part.env for part in self._added}) < len(self._added):
            raise ConfigError(
                "env.composite: a part without a gate is named twice; name it once, with both "
                "weights added"
            )
        if self._gates and GATE in names:
            raise ConfigError(
                f"env.composite: where parts have gates, none may be called '{GATE}', as their own "
                "metric is; rename that part"
            )
        self._conductor = self.config.conducted_by
        if self._conductor is not None and self._conductor not in names:
            raise ConfigError(
                f"env.composite: conducted_by={self._conductor} is none of the parts, which are "
                f"{', '.join(names)}"
            )
        self._environments = {name: environments[name] for name in names}
        self._calls = {name: PartCalls(name) for name in names}
        specs = [part.spec for part in self._environments.values()]
        self.spec = EnvironmentSpec(
            judges=max((one.judges for one in specs), key=get_args(JudgingUnit).index),
            stop_strings=tuple(dict.fromkeys(text for one in specs for text in one.stop_strings)),
            noise_floor=None,
            has_state=any(one.has_state for one in specs),
            rests=any(one.rests for one in specs),
            tools=tuple(tool for one in specs for tool in one.tools),
            components=self._names_of_components(),
        )

    def _names_of_components(self) -> tuple[str, ...] | None:
        names = list[str]()
        for part in self._added:
            own = self._environments[part.env].spec.components
            if own is None:
                return None
            names += [f"{part.env}/{name}" for name in own] or [part.env]
        return (*names, GATE) if self._gates and not self.config.as_components else tuple(names)

    @property
    def parts(self) -> Mapping[str, Environment]:
        """The environments that score, by name."""
        return self._environments

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Let every part score the conversations, and add up the rewards."""
        returns = self._ask_all(message_log_batch, metadata)
        totals = {name: total_of(one.rewards) for name, one in returns.items()}
        failed = {name: failures_of(one, totals[name].tolist()) for name, one in returns.items()}
        rewards_B = [_sum_up(one, totals, failed, index) for index, one in enumerate(metadata)]
        deciding = returns.values() if self._conductor is None else [returns[self._conductor]]
        terminateds = torch.stack([one.terminateds.bool() for one in deciding]).any(dim=0)
        for name, one in returns.items():
            left = (terminateds & ~one.terminateds.bool()).nonzero().flatten().tolist()
            own = [{**(one.metadata[i] or {}), **_ids(metadata[i])} for i in left]
            close_quietly(self._environments[name], own)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": join_observations(returns, index)}
                for index in range(len(message_log_batch))
            ]
            if self._conductor is None
            else returns[self._conductor].observations,
            metadata=[
                given
                if bool(terminateds[index])
                else {
                    **(given or {}),
                    OF_PARTS: {name: one.metadata[index] for name, one in returns.items()},
                    SO_FAR: rewards_B[index],
                }
                for index, given in enumerate(metadata)
            ],
            next_stop_strings=[stops(returns, index) for index in range(len(message_log_batch))],
            rewards=self._components(returns, totals, terminateds),
            terminateds=terminateds,
            answers=[answer_of(returns, index) for index in range(len(message_log_batch))],
            failures=self._join_failures(failed, len(message_log_batch)),
            invalid_calls=[
                any(
                    one.invalid_calls is not None and one.invalid_calls[i]
                    for one in returns.values()
                )
                for i in range(len(message_log_batch))
            ],
            # The parts' own rewards: a gate is no component, and a weight may be 0.
            notes=[
                {
                    "rewards": one,
                    "parts": {name: of.notes and of.notes[index] for name, of in returns.items()},
                }
                for index, one in enumerate(rewards_B)
            ],
        )

    def close_conversations(self, metadata: Sequence[dict[str, Any] | None]) -> None:
        """Tell every part that these conversations have ended."""
        for name, environment in self._environments.items():
            close_quietly(environment, [_own(one, name) for one in metadata])

    def _ask_all(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> dict[str, EnvironmentReturn]:
        first = self._conductor
        if first is None:
            return self._ask(self._environments, message_log_batch, metadata)
        conducted = self._ask({first: self._environments[first]}, message_log_batch, metadata)
        over = conducted[first].terminateds.bool().tolist()
        chosen = [index for index, is_over in enumerate(over) if is_over]
        others = {name: one for name, one in self._environments.items() if name != first}
        scored = self._ask(
            others if chosen else {},
            [message_log_batch[index] for index in chosen],
            [metadata[index] for index in chosen],
        )
        own = {name: [_own(one, name) for one in metadata] for name in others}
        returns = conducted | {
            name: scatter_return(scored.get(name), chosen, own[name]) for name in others
        }
        return {name: returns[name] for name in self._environments}

    def _ask(
        self,
        environments: Mapping[str, Environment],
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[dict[str, Any] | None],
    ) -> dict[str, EnvironmentReturn]:
        futures = {
            name: self._calls[name].begin(
                environment.step, message_log_batch, [_own(one, name) for one in metadata]
            )
            for name, environment in environments.items()
        }
        returns = {}
        for name, future in futures.items():
            try:
                step = environments[name].step
                checked = checked_return(step, future.result()(), len(message_log_batch))
                returns[name] = checked.returned
            except Exception as error:
                error.add_note(f"in the part '{name}' of a composite environment")
                raise
        return returns

    def _join_failures(
        self, failed: Mapping[str, Sequence[str | None]], size: int
    ) -> list[str | None]:
        needed = {part.env for part in self._added if part.weight != 0.0}
        needed |= {name for name, _ in self._gates}
        failures: list[str | None] = []
        for index in range(size):
            reasons = [
                f"{name}: {of_part[index]}"
                for name, of_part in failed.items()
                if name in needed and of_part[index] is not None
            ]
            failures.append("; ".join(reasons) or None)
        return failures

    def _components(
        self, returns: dict[str, EnvironmentReturn], totals: dict[str, Tensor], terminateds: Tensor
    ) -> dict[str, Tensor]:
        components: dict[str, Tensor] = {}
        for part in self._added:
            scored = returns[part.env]
            parts = scored.rewards if isinstance(scored.rewards, dict) else {"": scored.rewards}
            for name, values in parts.items():
                weighted = part.weight * precise(values)
                if part.weight == 0.0:  # a failed reward may be NaN
                    weighted = torch.zeros_like(weighted)
                components[f"{part.env}/{name}" if name else part.env] = weighted
        if not self._gates:
            return components
        shut_out = torch.stack([totals[name] < gate for name, gate in self._gates]).any(dim=0)
        if self._conductor is not None:  # the others have not scored yet
            shut_out &= terminateds
        gated = self.config.gated_reward
        if self.config.as_components:
            share = gated / len(components)
            return {
                name: torch.where(shut_out, torch.full_like(values, share), values)
                for name, values in components.items()
            }
        added = torch.stack(list(components.values())).sum(dim=0)
        return components | {GATE: torch.where(shut_out, gated - added, torch.zeros_like(added))}

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute the metrics of a batch, and of each part in it.

        The metrics of a part, `<part>/<metric>`, are computed over the completions that it scored,
        from its own rewards, without weight and gate. `gated_out` is the share of completions that
        a gate rejected. A part with weight 0 also has `<part>/reward_mean`. A batch without `notes`
        does not say what the parts have scored.
        """
        metrics = batch_metrics(batch) | mean_of("reward_mean", numbers(batch["rewards"]))
        for name, theirs in self._batches_of_parts(batch).items():
            _, of_part = self._environments[name].global_post_process_and_metrics(theirs)
            for metric, value in of_part.items():
                metrics[f"{name}/{metric.removeprefix(f'{name}_env/')}"] = value
            if name in self._watched:
                metrics |= mean_of(f"{name}/reward_mean", numbers(theirs["rewards"]))
        shut_out = []
        for note in batch.get("notes") or ():
            rewards = note["rewards"] if note else {}
            own = [(rewards.get(name), gate) for name, gate in self._gates]
            known = [(reward, gate) for reward, gate in own if reward is not None]
            if own and len(known) == len(own):
                shut_out.append(float(any(reward < gate for reward, gate in known)))
        return batch, metrics | mean_of("gated_out", shut_out)

    def end_batch(self, batch: Mapping[str, Any]) -> None:
        """Update the state of each part from the completions that it scored."""
        for name, theirs in self._batches_of_parts(batch).items():
            if self._environments[name].spec.has_state:
                self._environments[name].end_batch(theirs)

    def _batches_of_parts(self, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        notes = batch.get("notes") or ()
        batches = {}
        for name in self._environments:
            rewards = [note["rewards"][name] if note else None for note in notes]
            scored = [index for index, reward in enumerate(rewards) if reward is not None]
            batches[name] = rows_of(batch, scored) | {
                "rewards": torch.tensor([rewards[index] for index in scored], dtype=torch.float32),
                "components": {},
                "notes": [notes[index]["parts"].get(name) for index in scored],
                "num_failures": sum(note is not None for note in notes) - len(scored),
            }
        return batches

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """Return the tasks that any part rejects, each once per part."""
        rejected = []
        for name, environment in self._environments.items():
            for one in environment.validate(tasks):
                rejected.append(RejectedTask(task=one.task, reason=f"{name}: {one.reason}"))
        return rejected

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts that have a state."""
        return {
            name: part.state_dict()
            for name, part in self._environments.items()
            if part.spec.has_state
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved states of the parts."""
        for name, own in state.items():
            self._environments[name].load_state_dict(own)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Pass the policy's tokenizer on to each part."""
        for part in self._environments.values():
            part.use_tokenizer(tokenizer)

    def noise_floor(self) -> float:
        """Return the noise of the total reward: of its parts, and of the rounding of their sum.

        The rounding is that of rewards between -1 and 1.
        """
        rounding = float(np.finfo(np.float64).eps)
        return math.fsum(
            abs(part.weight) * (self._environments[part.env].noise_floor() + rounding)
            for part in self._added
        )

    def shutdown(self) -> None:
        """Shut down every part."""
        for environment in self._environments.values():
            environment.shutdown()


def _own(metadata: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return the metadata for a part: at first that of the task, later what the part returned."""
    if metadata is None or OF_PARTS not in metadata:
        return metadata
    own: dict[str, Any] | None = metadata[OF_PARTS][name]
    ids = _ids(metadata)
    return {**(own or {}), **ids} if ids else own


def _ids(metadata: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (metadata or {}).items() if key in OF_ROLLOUT}


def _sum_up(
    given: dict[str, Any] | None,
    totals: Mapping[str, Tensor],
    failed: Mapping[str, Sequence[str | None]],
    index: int,
) -> dict[str, float | None]:
    """Return each part's total reward of a completion over all turns so far; None if it failed."""
    before = (given or {}).get(SO_FAR, {})
    rewards: dict[str, float | None] = {}
    for name, totals_B in totals.items():
        earlier = before.get(name, 0.0)
        is_known = earlier is not None and failed[name][index] is None
        rewards[name] = earlier + float(totals_B[index]) if is_known else None
    return rewards


# Joining the returns of the parts.

Returns = Mapping[str, EnvironmentReturn]
"""The return value of each part, by its name."""


MAX_CALLS = 160
"""The maximum number of concurrent calls of one part: 64 of the running batch, 64 of a validation
at the same time, and 32 that were given up, so that a part that is only slow is not refused."""
PATIENCE_SECONDS = 30.0
"""The time that a further call waits until one of them ends."""


class PartCalls:
    """Limits the concurrent calls of one part, in daemon threads."""

    def __init__(self, name: str) -> None:
        """Set the limit; no thread is started."""
        self._name = name
        self._limit = MAX_CALLS
        self._places = threading.BoundedSemaphore(self._limit)

    def begin(
        self, step: Callable[..., EnvironmentReturn], *arguments: Any
    ) -> Future[CallEnd[EnvironmentReturn]]:
        """Call a part in a thread.

        Raises:
            EnvironmentFailedError: The limit is reached, and no call has ended in time.
        """
        # A thread cannot be ended from outside. A caller gives a call up after a time and calls
        # again, so a part that never returns would take one more thread with every call.
        if not self._places.acquire(timeout=PATIENCE_SECONDS):
            raise EnvironmentFailedError(
                f"{self._limit} calls of the part '{self._name}' of a composite environment have "
                "not come back, and threads cannot be ended; no more are begun until one does. "
                "Give what it waits for a time limit of its own, shorter than env.timeout_seconds"
            )
        try:
            name = f"laurel-composite-{self._name}"
            future = begin_in_thread(step, *arguments, name=name)
        except RuntimeError:  # the system has no more threads
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future


def scatter_return(
    scored: EnvironmentReturn | None, chosen: Sequence[int], metadata: Sequence[Any]
) -> EnvironmentReturn:
    """Return a part's return value for all conversations, with defaults for those it skipped."""
    size, place = len(metadata), {index: i for i, index in enumerate(chosen)}

    def filled(values: Sequence[Any] | None, default: Any) -> list[Any]:
        return [values[place[i]] if values and i in place else default for i in range(size)]

    def placed(values: Tensor) -> Tensor:
        whole = torch.zeros(size, dtype=values.dtype)
        whole[list(chosen)] = values.to("cpu")
        return whole

    if scored is None:
        rewards: Tensor | dict[str, Tensor] = torch.zeros(size)
    elif isinstance(scored.rewards, Tensor):
        rewards = placed(scored.rewards)
    else:
        rewards = {name: placed(values) for name, values in scored.rewards.items()}
    found = scored.metadata if scored is not None else None
    return EnvironmentReturn(
        observations=filled(scored and scored.observations, {"role": "environment", "content": ""}),
        metadata=[found[place[i]] if found and i in place else metadata[i] for i in range(size)],
        next_stop_strings=[None] * size,
        rewards=rewards,
        terminateds=torch.zeros(size, dtype=torch.bool),
        answers=filled(scored and scored.answers, None),
        failures=filled(scored and scored.failures, None),
        notes=filled(scored and scored.notes, None),
        invalid_calls=filled(scored and scored.invalid_calls, False),
    )


def total_of(rewards: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return each completion's reward, the sum if there are components: float64 [B]."""
    if isinstance(rewards, Tensor):
        return precise(rewards)
    return torch.stack([precise(one) for one in rewards.values()]).sum(dim=0)


def failures_of(scored: EnvironmentReturn, totals_B: Sequence[float]) -> list[str | None]:
    """Return, for each completion, why a part has no reward; None if it has a finite one."""
    given = scored.failures or [None] * len(totals_B)
    return [
        f"the reward is {reward}" if reason is None and not math.isfinite(reward) else reason
        for reason, reward in zip(given, totals_B, strict=True)
    ]


def join_observations(returns: Returns, index: int) -> str:
    """Join the parts' observations on a conversation, without repetitions."""
    said = (m for one in returns.values() for m in messages_of(one.observations[index]))
    return "\n".join(dict.fromkeys(m["content"] for m in said if m["content"]))


def stops(returns: Returns, index: int) -> list[str] | None:
    """Return all strings at which a part wants the policy to stop; None without any."""
    wanted = [one.next_stop_strings[index] for one in returns.values()]
    if all(one is None for one in wanted):
        return None
    return list(dict.fromkeys(text for one in wanted for text in one or []))


def answer_of(returns: Returns, index: int) -> str | None:
    """Return the answer of the first part that read one."""
    found = (one.answers[index] for one in returns.values() if one.answers is not None)
    return next((text for text in found if text is not None), None)


def rows_of(batch: Mapping[str, Any], wanted: list[int]) -> dict[str, Any]:
    """Return a batch of only the completions at these indices."""
    size = len(batch["group_ids"])
    rows: dict[str, Any] = {}
    for key, values in batch.items():
        if isinstance(values, Tensor) and values.ndim and len(values) == size:
            rows[key] = values[wanted]
        elif isinstance(values, list | tuple) and len(values) == size:
            rows[key] = [values[index] for index in wanted]
        else:
            rows[key] = values
    return rows

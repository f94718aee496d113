"""Defines an environment that scores conversations with a reward model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from laurel.config.environments import (
    EnsemblePart,
    RewardModelEnvironmentConfig,
    ScorerSource,
    ScoreTransformConfig,
)
from laurel.data.forest import to_padded
from laurel.environments.interface import (
    IDS,
    EnvironmentInterface,
    EnvironmentSpec,
    RejectedTask,
    batch_metrics,
    mean_of,
    numbers,
    settings_of,
)
from laurel.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    Names,
    speaking,
)
from laurel.models.scoring import StepRules, step_ends
from laurel.models.spec import ModelSpec, ParallelShape
from laurel.protocols import MessageLog, Scorer
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.ensemble import EnsembleScorer
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.open import (
    HERE,
    MakeGroup,
    ScorerPlacement,
    blocking,
    open_scorer,
    read_statistics,
)
from laurel.rewards.preparing import is_text
from laurel.rewards.replicas import ROLE
from laurel.rewards.scorer import ContractScorer, ModelScorer, conversation_group
from laurel.rewards.spec import Device, MemberSpec, NamedSource, Say, ScorerSpec, ScoringEngine
from laurel.rewards.version import content_of
from laurel.types import (
    Completion,
    Conversation,
    EnvironmentReturn,
    Group,
    JudgingUnit,
    Message,
    Score,
    StepReward,
    Task,
    group_of,
)

if TYPE_CHECKING:
    from laurel.workers.ray_actor import ActorMaker


__all__ = ["RewardModelEnvironment", "RewardModelEnvironmentConfig"]

PREFIX = "reward_model_env/"
"""The prefix of the names of this environment's metrics."""


class _ScoreNote(TypedDict):
    """The note of a scored conversation, which the finished batch holds."""

    score: float
    reference: float  # score of the task's own answer, where it is subtracted; otherwise 0
    truncated: bool
    parts: dict[str, float]


class RewardModelEnvironment(EnvironmentInterface):
    """Scores conversations with a reward model; a score ends its conversation.

    With `use_reward_loop`, completions are scored while others are still being sampled: one by one
    if the scorer merges concurrent requests, otherwise in parts of their group.

    Example::

        with RewardModelEnvironment({"model_name": "results/rm"}) as environment:
            verdicts = environment.step([[{"role": "user", "content": "Why?"},
                                          {"role": "assistant", "content": "Because."}]], [{}])
    """

    def __init__(
        self,
        config: RewardModelEnvironmentConfig | Mapping[str, Any],
        *,
        scorer: Scorer | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        opening: ScorerPlacement | None = None,
        say: Say | None = None,
    ) -> None:
        """Load the model, and check that it gives the scores that it gave when it was saved.

        Errors of the configuration are raised before anything is loaded.

        Args:
            config: The settings; a plain dictionary is validated first.
            scorer: A scorer to use instead of that of the settings; the environment owns it and
                closes it.
            device: The device of the model; `auto` is a GPU if there is one.
            opening: The placement of processes, e.g. on a cluster; None for this machine.
            say: Called with lines about what was loaded, found and decided; None writes them to the
                log.

        Raises:
            UserError: A setting or a model cannot be used.
        """
        self._scorer: ModelScorer | BlockingScorer | None = None
        self.config = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
        stored: tuple[float | None, float | None] = (None, None)
        steps: StepRules | None = None
        if isinstance(scorer, ModelScorer):
            stored = scorer.contract.rules.mean, scorer.contract.rules.std
        if scorer is not None:
            self.transform = ScoreTransform(self.config.transform, stored=stored)
            self._scorer = blocking(scorer)
        else:
            spec = scorer_spec_of(self.config, device=device)
            if self.config.transform.normalize == "stored":
                stored = read_statistics(spec)
            self.transform = ScoreTransform(self.config.transform, stored=stored)
            self._scorer = open_scorer(spec, say=say or _log, placement=opening or HERE)
            opened = self._scorer
            scorer = opened.scorer if isinstance(opened, BlockingScorer) else opened
        self._say = say or _log
        # Read now: the files may be replaced while the run goes on.
        self._version: str = getattr(scorer, "version", "")
        self._names_components: bool = getattr(scorer, "names_components", False)
        self._reads_metadata: bool = getattr(scorer, "reads_metadata", False)
        self._judges_groups: bool = getattr(scorer, "judges_groups", False)
        judges: JudgingUnit
        if not self.config.use_reward_loop:
            judges = "batch"
        elif self._judges_groups:
            judges = "group"
        else:
            # Unmerged requests depend on nothing else: the same run gives the same scores, bit
            # for bit, and in parts a prompt is not computed for each of its completions.
            judges = "completion" if merges(scorer) else "part"
        # The steps of an answer and those of its reference do not belong together.
        if isinstance(scorer, ModelScorer) and not self.config.transform.subtract_reference:
            steps = scorer.contract.rules.steps
        self._separator = None if steps is None else steps.separator
        self.spec = EnvironmentSpec(
            judges=judges,
            noise_floor=None,
            has_state=True,
            gives_steps=self._separator is not None,
            components=None if self._names_components else (),
            rests=getattr(scorer, "rests", False),
        )
        self._noise_probe = NoiseProbe()
        declared: float | None = getattr(scorer, "noise", None)
        # Of scores, and of the values of steps, which are noisier than their mean or product.
        self._noise = {False: declared, True: declared}
        self._lock = threading.Lock()

    @classmethod
    def options(cls, **options: Any) -> ActorMaker:
        """Return an object with the same `remote`, which creates actors with a GPU if there is any.

        If `dtensor_cfg.tensor_parallel_size` or `resources` require several ranks, further actors
        hold the shards of the model.
        """
        from laurel.workers.ray_actor import ActorMaker

        if cls.__init__ is not RewardModelEnvironment.__init__:  # a subclass with its own arguments
            return ActorMaker(cls, **options)
        return ActorMaker(cls, make=partial(make_in_actor, cls), gpus=gpus_of_actor, **options)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the reward model, with the template that renders conversations.

        It must not be used while another thread scores.
        """
        return self._with_contract().contract.tokenizer

    def preprocess_data(self, message_logs: Sequence[MessageLog]) -> dict[str, torch.Tensor]:
        """Render and tokenise conversations into padded rows, which the model reads.

        Returns:
            `input_ids` int64 [B, L], padded on the right with the model's padding token;
                `input_lengths` int64 [B]; and `truncated` bool [B].

        Raises:
            DataError: A conversation cannot be read or rendered.
        """
        scorer = self._with_contract()
        cases = [read_case(log) for log in message_logs]
        for index, case in enumerate(cases):
            if case.failure is not None:
                raise DataError(f"conversation {index}: {case.failure}")
        groups = scorer.encode([conversation_group(case.conversation) for case in cases])
        if not groups:
            empty = torch.zeros(0, dtype=torch.int64)
            return {
                "input_ids": empty.reshape(0, 0),
                "input_lengths": empty,
                "truncated": empty.bool(),
            }
        rows = to_padded(groups, pad_id=scorer.pad_id)
        return {
            "input_ids": rows.ids_NL,
            "input_lengths": rows.lengths_N,
            "truncated": torch.tensor([group.truncated_G[0] for group in groups]),
        }

    def step(
        self,
        message_logs: Sequence[MessageLog],
        env_infos: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> EnvironmentReturn:
        """Score any number of conversations; thread-safe.

        A conversation without a finite score is a failure with the reward NaN. Conversations with
        the same prompt share its computation; equal ones get the same reward.

        Args:
            message_logs: The raw messages, with the policy's answer last.
            env_infos: The metadata, which is returned unchanged, and may be empty. With
                `transform.subtract_reference`, the score of `ground_truth` is subtracted from that
                of the answer.
        """
        infos: list[Any] = list(env_infos or [None] * len(message_logs))
        if len(infos) != len(message_logs):
            raise ValueError(f"{len(message_logs)} conversations came with {len(infos)} metadata")
        cases = self._score(message_logs, infos)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": c.observation} for c in cases],
            metadata=infos,
            next_stop_strings=[None] * len(cases),
            rewards=torch.tensor([case.reward for case in cases], dtype=torch.float64),
            terminateds=torch.ones(len(cases), dtype=torch.bool),
            answers=[
                case.conversation[-1].content if case.conversation else None for case in cases
            ],
            failures=[case.failure for case in cases],
            notes=[
                None
                if case.failure is not None
                else _ScoreNote(
                    score=case.score,
                    reference=case.reference_score if case.reference else 0.0,
                    truncated=case.truncated,
                    parts=case.parts,
                )
                for case in cases
            ],
            steps=None if self._separator is None else [case.steps for case in cases],
            components=[case.parts for case in cases] if self._names_components else None,
        )

    def _score(
        self, message_logs: Sequence[MessageLog], infos: Sequence[Mapping[str, Any] | None]
    ) -> list[Case]:
        cases = [read_case(log) for log in message_logs]
        for case, info in zip(cases, infos, strict=True):
            # The group's id must not make equal metadata differ.
            case.info = {key: value for key, value in (info or {}).items() if key not in IDS}
            if self.config.transform.subtract_reference:
                case.add_reference(info)
        readable = [case for case in cases if case.failure is None]
        # Padded rows gain nothing from groups, and divide better one by one.
        is_padded = getattr(self._scorer, "path", None) == "padded"
        with speaking(IN_THE_SECTION):
            score_cases(
                readable,
                self._open().score_now,
                # Completions that are compared must be one group, whatever computes them.
                share_prompts=self._judges_groups or not is_padded,
                reads_metadata=self._reads_metadata,
                judges_groups=self._judges_groups,
            )
        # A run reads one of the two.
        if all(noise is None for noise in self._noise.values()):
            self._noise_probe.add(case.conversation for case in readable if case.failure is None)
        whole = [case for case in cases if case.failure is None]
        references = [case.reference_score for case in whole]
        rewards = self.transform.rewards(
            [case.score for case in whole],
            references if self.config.transform.subtract_reference else None,
        )
        for case, reward in zip(whole, rewards, strict=True):
            if abs(reward) <= torch.finfo(torch.float32).max:
                case.reward = reward
                self._add_steps(case)
            else:
                case.failure = "the reward is not finite"
        return cases

    def _add_steps(self, case: Case) -> None:
        if self._separator is None:
            return
        answer = case.conversation[-1].content
        # As the contract reads them: the last step goes on to the end.
        ends = [*step_ends(answer, self._separator)[:-1], len(answer)]
        if len(ends) != len(case.values):
            case.failure = f"the scorer gave {len(case.values)} values for {len(ends)} steps"
            return
        rewards = self.transform.rewards(case.values)
        case.steps = tuple(map(StepReward, ends, rewards))

    def scores(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Return the model's raw scores of groups, before they are transformed into rewards."""
        return self._open().score_now(groups)

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """Return the tasks without a reference answer, if its score is subtracted."""
        if not self.config.transform.subtract_reference:
            return []
        return [
            RejectedTask(task=task, reason=NO_REFERENCE)
            for task in tasks
            if reference_of(task.metadata) is None
        ]

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute the metrics of a batch's rewards.

        Their names begin with `reward_model_env/`. The mean, minimum and maximum over nothing are
        absent, and so is the standard deviation (divided by n - 1) of fewer than two rewards. If
        the batch has `notes` of every conversation, there are also `num_truncated`, the mean and
        standard deviation of the scores if they differ from the rewards, and those of their parts
        (`Score.parts`) as `part/<name>/mean` and `part/<name>/std`.

        Args:
            batch: The finished batch of `protocols.Environment`, of which any entry may be missing.
        """
        rewards = numbers(batch.get("rewards", ()))
        figures = batch_metrics(batch) if "group_ids" in batch else {}
        samples = batch["rewards"] if "rewards" in batch else batch.get("message_log", ())
        figures["num_samples"] = float(len(samples))
        figures["num_failures"] = float(batch.get("num_failures", 0))
        figures |= _spread("reward", rewards)
        if rewards:
            figures |= {"min_reward": min(rewards), "max_reward": max(rewards)}
        notes = batch.get("notes")
        if notes is not None and all(note is not None for note in notes):
            figures["num_truncated"] = float(sum(note["truncated"] for note in notes))
            if not self.transform.changes_nothing:
                figures |= _spread("score", [note["score"] for note in notes])
            for part in sorted({name for note in notes for name in note["parts"]}):
                spread = _spread("", [n["parts"][part] for n in notes if part in n["parts"]])
                figures |= {f"part/{part}/{key.strip('_')}": v for key, v in spread.items()}
        return batch, {f"{PREFIX}{name}": value for name, value in figures.items()}

    def end_batch(self, batch: Mapping[str, Any]) -> None:
        """Update the statistics of `normalize: running` from the scores in a batch's `notes`."""
        notes = [note for note in batch.get("notes") or () if note is not None]
        self.transform.end_batch(
            # Notes of older checkpoints lack it: their scores counted when they came.
            [note["score"] - note["reference"] for note in notes if "reference" in note]
        )

    def noise_floor(self) -> float:
        """Return the noise of the scores in units of the reward; smaller differences mean nothing.

        The first call measures it with `measure_noise`, on the golden conversations that the model
        was saved with, or otherwise on the first that were scored.
        """
        return self._measured(of_steps=False)

    def step_noise_floor(self) -> float:
        """Return what `noise_floor` does, for the rewards of steps."""
        return self._measured(of_steps=True)

    def _measured(self, *, of_steps: bool) -> float:
        with self._lock:
            noise = self._noise[of_steps]
            if noise is None:
                found = self.noise_groups()
                noise = rounding_noise(self._open(), found or PROBE, of_steps=of_steps)
                self._noise[of_steps] = noise if found else None
            return noise * self.transform.factor

    def noise_groups(self) -> list[Group]:
        """Return the groups on which the noise is measured; empty if there are too few."""
        scorer = self._open()
        chosen = []
        if isinstance(scorer, ModelScorer):
            chosen = [entry.messages for entry in scorer.contract.rules.golden]
        chosen = list(dict.fromkeys(chosen if len(chosen) > 1 else self._noise_probe.all()))
        return by_prompt(chosen) if len(chosen) > 1 else []

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """Free device memory that the run's own processes hold, while the context is open."""
        return self._open().resting()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to give the same rewards, as JSON values."""
        return {
            "transform": self.transform.state_dict(),
            "noise": self._noise[False],
            "step_noise": self._noise[True],
            "version": self._version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, and say so if it is that of another reward model."""
        before = state.get("version", "")  # older checkpoints have none
        if before and self._version and content_of(before) != content_of(self._version):
            self._say(
                f"warning: env.reward_model: this is another reward model than before: {before} "
                f"until this checkpoint, {self._version} from here on. Rewards and the best "
                "checkpoint so far are in the units of the first; put its files back, or begin "
                "another run (checkpointing.checkpoint_dir)"
            )
        self.transform.load_state_dict(state["transform"])
        # Older checkpoints lack the second, and are of runs that do not read it.
        self._noise = {False: state["noise"], True: state.get("step_noise")}

    def shutdown(self) -> None:
        """Close the scorer; further calls do nothing.

        A model in this process finishes its running calls; the running calls of other scorers fail.
        """
        scorer, self._scorer = self._scorer, None
        if scorer is None:
            return
        with scorer:
            pass  # its `close` would leave the processes that tokenise for it
        del scorer
        torch.cuda.empty_cache()  # does nothing in a process that has not used a GPU

    def __del__(self) -> None:
        """Close the scorer if `shutdown` was not called."""
        try:  # noqa: SIM105  when a process ends, contextlib may be gone
            self.shutdown()
        except Exception:
            pass

    def _open(self) -> ModelScorer | BlockingScorer:
        scorer = self._scorer
        if scorer is None:
            raise EnvironmentFailedError("the reward-model environment was shut down")
        return scorer

    def _with_contract(self) -> ModelScorer:
        scorer = self._open()
        if not isinstance(scorer, ModelScorer):
            raise ConfigError("the scorer in use renders by itself: its tokens are not seen here")
        return scorer


def _log(line: str) -> None:
    # Waits and warnings are for the user to see, so they are warnings of the log too.
    is_urgent = line.startswith(("warning", "waiting"))
    logging.getLogger(__name__).log(logging.WARNING if is_urgent else logging.INFO, line)


def _spread(what: str, values: Sequence[float]) -> dict[str, float]:
    figures = mean_of(f"mean_{what}", values)
    if len(values) > 1:
        mean = figures[f"mean_{what}"]
        squares = math.fsum((value - mean) ** 2 for value in values)
        figures[f"std_{what}"] = math.sqrt(squares / (len(values) - 1))
    return figures


# Scoring conversations: read, given a reference, and grouped.

REFERENCE = "ground_truth"
"""The metadata key of a task's reference answer."""
NO_REFERENCE = (
    f"the metadata has no text '{REFERENCE}', and env.reward_model.transform.subtract_reference "
    "needs it"
)


@dataclass(slots=True, kw_only=True)
class Case:
    """A conversation, and its reward or the reason why it has none."""

    conversation: Conversation = ()
    reference: Conversation = ()
    """The same prompt with the task's reference answer, if its score is subtracted."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The metadata of the conversation's task."""
    failure: str | None = None
    score: float = math.nan
    parts: dict[str, float] = field(default_factory=dict)
    """The numbers from which the score was combined (`Score.parts`)."""
    reference_score: float = math.nan
    truncated: bool = False
    reward: float = math.nan
    values: tuple[float, ...] = ()
    """The outputs of the scorer: of a process reward model, the values of the steps."""
    steps: tuple[StepReward, ...] | None = None

    def add_reference(self, info: Mapping[str, Any] | None) -> None:
        """Set the reference answer from a task's metadata; without one the case fails."""
        answer = reference_of(info)
        if answer is None:
            self.failure = self.failure or NO_REFERENCE
        else:
            self.reference = (*self.conversation[:-1], Message("assistant", answer))

    @property
    def observation(self) -> str:
        """The text of the environment's message about the result."""
        if self.failure is not None:
            return f"Environment: no reward ({self.failure})"
        return f"Environment: {self.reward:.6g}"


def read_case(message_log: MessageLog) -> Case:
    """Return a message log as a case, which has failed unless it ends with an answer."""
    messages: list[Message] = []
    for number, message in enumerate(message_log, start=1):
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return Case(failure=f"message {number} has no role or no content that is text")
        if not is_text(content):
            return Case(failure=f"message {number} contains an unpaired UTF-16 surrogate")
        messages.append(Message(role, content))
    if not messages or messages[-1].role != "assistant":
        ends = f"ends with a message of {messages[-1].role!r}" if messages else "has no message"
        return Case(
            conversation=tuple(messages),
            failure=f"the conversation {ends}: there is no answer to score",
        )
    return Case(conversation=tuple(messages))


def reference_of(info: Mapping[str, Any] | None) -> str | None:
    """Return the reference answer in a task's metadata, if it has one."""
    answer = (info or {}).get(REFERENCE)
    return answer if isinstance(answer, str) and is_text(answer) else None


def score_cases(
    cases: Sequence[Case],
    score: ScoreNow,
    *,
    share_prompts: bool,
    reads_metadata: bool = False,
    judges_groups: bool = False,
) -> None:
    """Score cases, and store each score or failure in its case.

    Args:
        cases: The cases, which have not failed so far.
        share_prompts: Whether conversations with the same prompt form one group.
        reads_metadata: Whether the scorer reads metadata, so that a group needs equal metadata.
        judges_groups: Whether the scorer compares the completions of a group. Then equal
            completions occur in it twice, and reference answers do not occur in it.
    """
    groups: dict[Any, tuple[list[Conversation], Mapping[str, Any]]] = {}
    index_of: dict[Any, int] = {}

    def place(case: Case, conversation: Conversation, *, is_reference: bool) -> tuple[Any, int]:
        """Add a conversation to its group; return the key of the group, and the index in it."""
        info = case.info if reads_metadata else {}
        key = (
            conversation[:-1] if share_prompts else conversation,
            json.dumps(info, sort_keys=True, default=repr) if info else "",
            is_reference and judges_groups,
        )
        members, _ = groups.setdefault(key, ([], info))
        # Equal conversations are scored once, or the order of sums would make them differ.
        if (key, conversation) not in index_of or (judges_groups and not is_reference):
            index_of[key, conversation] = len(members)
            members.append(conversation)
        return key, index_of[key, conversation]

    places = [
        (
            place(case, case.conversation, is_reference=False),
            place(case, case.reference, is_reference=True) if case.reference else None,
        )
        for case in cases
    ]
    asked = [_group(members, row, info) for row, (members, info) in enumerate(groups.values())]
    scores = dict(zip(groups, score(asked) if asked else [], strict=True))
    for case, ((group, index), reference) in zip(cases, places, strict=True):
        found = scores[group][index]
        case.truncated, case.parts = found.truncated, dict(found.parts)
        if found.value is None:
            case.failure = found.failure or "no score"
            continue
        case.score, case.values = found.value, found.values_K
        if reference is not None:
            given = scores[reference[0]][reference[1]]
            if given.value is None:
                case.failure = f"the reference answer has no score: {given.failure or 'no score'}"
            else:
                case.reference_score = given.value


def by_prompt(conversations: Iterable[Conversation]) -> list[Group]:
    """Group conversations that differ only in their last message."""
    prompts: dict[Conversation, list[Conversation]] = {}
    for conversation in conversations:
        prompts.setdefault(conversation[:-1], []).append(conversation)
    return [_group(members, index) for index, members in enumerate(prompts.values())]


def _group(
    members: Sequence[Conversation], index: int, metadata: Mapping[str, Any] | None = None
) -> Group:
    return Group(
        id=f"prompt {index}",
        prompt=members[0][:-1],
        completions_G=tuple(Completion(messages=member[-1:]) for member in members),
        metadata=metadata or {},
    )


# Converting scores into rewards: reference, normalisation, scale, shift, clip.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The count, the mean and the sum of squared deviations of numbers, in float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def joined(self, values: Sequence[float]) -> Moments:
        """Return the moments with more numbers; the order of these does not change any bit.

        This is Welford's update for whole batches; the moments of the batch are exact sums.
        """
        if not values:
            return self
        count = self.count + len(values)
        batch_mean = math.fsum(values) / len(values)
        batch_squares = math.fsum((value - batch_mean) ** 2 for value in values)
        away = batch_mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + away * len(values) / count,
            squares=self.squares + batch_squares + away**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float | None:
        """The standard deviation (divided by n); None if it is undefined."""
        if self.count < 2 or self.squares <= 0.0:
            return None
        return math.sqrt(self.squares / self.count)


class ScoreTransform:
    """Converts scores into rewards by a `ScoreTransformConfig`; thread-safe."""

    def __init__(
        self, config: ScoreTransformConfig, *, stored: tuple[float | None, float | None]
    ) -> None:
        """Check that the required statistics are available.

        Raises:
            ConfigError: The transform requires these statistics, and they are missing.
        """
        self.config = config
        self.seen = Moments()
        """The moments of all scores of the batches that have ended."""
        self._stored: tuple[float, float] | None = None
        if config.normalize == "stored":
            mean, std = stored
            if mean is None or std is None or not std > 0.0:
                raise ConfigError(
                    "env.reward_model.transform.normalize=stored: the model was saved without the "
                    "mean and standard deviation of its scores (scoring.json). Choose running or "
                    "none, or a model that `laurel rm` saved"
                )
            self._stored = mean, std

    @property
    def changes_nothing(self) -> bool:
        """Whether rewards are the scores themselves."""
        return self.config == ScoreTransformConfig()

    @property
    def factor(self) -> float:
        """The change of a reward for a change of 1 in the score, if nothing is clipped."""
        return abs(self.config.scale) / self._mean_and_std()[1]

    def rewards(
        self, scores: Sequence[float], references: Sequence[float] | None = None
    ) -> list[float]:
        """Convert scores into rewards.

        Args:
            references: The scores of the reference answers to the same prompts, if they are
                subtracted. The stored mean then cancels out.
        """
        config = self.config
        if references is not None:
            scores = [s - r for s, r in zip(scores, references, strict=True)]
        mean, std = self._mean_and_std()
        if config.normalize == "stored" and references is not None:
            mean = 0.0
        rewards = [(score - mean) / std * config.scale + config.shift for score in scores]
        if config.clip is not None:
            low, high = config.clip
            rewards = [min(max(reward, low), high) for reward in rewards]
        return rewards

    # With `normalize: running` the mean and the deviation change only when a batch ends, and before
    # the first has ended scores stay as they are. Were they to change with every score, completions
    # of one prompt that are scored at different times would be normalised differently, and the
    # policy would learn from the difference.
    def end_batch(self, scores: Sequence[float]) -> None:
        """Add a batch's scores, less those of reference answers, to the running statistics."""
        if self.config.normalize == "running":
            self.seen = self.seen.joined(scores)

    def _mean_and_std(self) -> tuple[float, float]:
        if self._stored is not None:
            return self._stored
        seen = self.seen
        return (0.0, 1.0) if seen.std is None else (seen.mean, seen.std)

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics, which a resumed run needs, as JSON values."""
        return {"seen": asdict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.seen = Moments(**state["seen"])


# The noise of a scorer: how far apart its scores of the same conversation can be.

MAX_PROBES = 8
"""The number of conversations on which the noise is measured."""

ScoreNow = Callable[[Sequence[Group]], list[tuple[Score, ...]]]

RESOLUTION = 2.0**-24
"""Half the distance of neighbouring float32 numbers, relative to their size: the rounding error of
the score itself.
"""

PROBE = tuple(
    group_of((Message("user", asked),), answers, group_id=asked)
    for asked, answers in (
        ("Where does the laurel grow?", ("By the western gate.", "I could not say where it is.")),
        ("How many are two and two?", ("Four.", "Two and two are five, as everybody knows.")),
    )
)
"""The groups on which the noise is measured if there are no others."""


class NoiseProbe:
    """Keeps a few of many conversations, which their hashes choose and not their order."""

    def __init__(self) -> None:
        self._by_digest: dict[str, Conversation] = {}
        self._lock = threading.Lock()

    def add(self, conversations: Iterable[Conversation]) -> None:
        """Add conversations, and keep those with the smallest hashes."""
        with self._lock:
            for conversation in conversations:
                digest = hashlib.blake2b(repr(conversation).encode("utf-8", "replace"))
                self._by_digest[digest.hexdigest()] = conversation
            while len(self._by_digest) > MAX_PROBES:
                del self._by_digest[max(self._by_digest)]

    def all(self) -> list[Conversation]:
        """Return the kept conversations, in the order of their hashes."""
        with self._lock:
            return [self._by_digest[digest] for digest in sorted(self._by_digest)]


def rounding_noise(
    scorer: ModelScorer | BlockingScorer, groups: Sequence[Group], *, of_steps: bool = False
) -> float:
    """Measure a scorer's rounding noise with `measure_noise`; 0 if it returns no scores."""
    if isinstance(scorer, LoopScorer):  # which would answer repetitions from its cache
        return scorer.directly(lambda model: rounding_noise(model, groups, of_steps=of_steps))
    measured = partial(measure_noise, groups=groups, of_steps=of_steps)
    with contextlib.suppress(ValueError):
        if isinstance(scorer, BlockingScorer):
            return measured(scorer.score_afresh)
        if isinstance(scorer, ContractScorer) and scorer.has_exact_scores:
            # Not every device and kernel supports float64, or has the memory.
            with contextlib.suppress(RuntimeError, TypeError):
                return measured(scorer.score_now, exact=scorer.score_exactly)
        return measured(scorer.score_now)
    return 0.0


def measure_noise(
    score: ScoreNow,
    groups: Sequence[Group],
    *,
    exact: ScoreNow | None = None,
    of_steps: bool = False,
) -> float:
    """Measure the noise of a scorer, about one standard deviation, in units of its scores.

    A conversation has one true score, but rounding depends on the conversation and on the rest of
    its batch. So two noises are measured, and the larger is the result, which is at least the
    resolution of float32.

    - Across batches: every conversation is scored together with the other answers to its prompt,
    alone, without sharing its prompt among all others, and with everything in reversed order. The
    noise is the root mean square of the largest deviations from a conversation's own mean.
    - Against exact scores, if there are any: the standard deviation of the error among the answers
    to one prompt. An error that all of them share affects no comparison. Arithmetic that rounds
    equally in any batch, as bfloat16 on a CPU may, shows its noise only here.

    Args:
        groups: The groups to score. The layouts of batches differ only with at least two prompts
            that have two answers each.
        exact: Scores groups in a higher precision.
        of_steps: Whether the noise is that of the scorer's outputs, which are the values of the
            steps, instead of that of the scores.

    Raises:
        ValueError: No conversation could be scored.
    """
    values_of = partial(_values, of_steps=of_steps)
    together = score(groups)
    sizes = [value for values in values_of(together) for value in values]
    size = _root_mean_square(sizes) if sizes else 0.0
    alone = [replace(g, completions_G=(c,)) for g in groups for c in g.completions_G]
    turned = [replace(g, completions_G=g.completions_G[::-1]) for g in groups[::-1]]
    layouts = [
        values_of(together),
        [values for one in alone for values in values_of(score([one]))],
        values_of(score(alone)),
        values_of(score(turned))[::-1],
    ]
    deviations = []
    for of_conversation in zip(*layouts, strict=True):
        # A layout without a score has no value, and leaves the conversation out.
        for values in zip(*of_conversation, strict=False):
            mean = math.fsum(values) / len(values)
            deviations.append(max(abs(value - mean) for value in values))
    if not deviations:
        raise ValueError("the noise of a scorer cannot be measured on what it cannot score")
    found = [_root_mean_square(deviations), RESOLUTION * size]
    if exact is not None:
        found.append(_pooled_error(together, exact(groups), values_of))
    return max(found)


def _pooled_error(
    rounded: Sequence[tuple[Score, ...]],
    exact: Sequence[tuple[Score, ...]],
    values_of: Callable[[Sequence[tuple[Score, ...]]], list[tuple[float, ...]]],
) -> float:
    """Return the standard deviation of errors, pooled within groups, or over groups of one."""
    errors_BG = [
        [
            value - true
            for values, trues in zip(values_of([one]), values_of([other]), strict=True)
            for value, true in zip(values, trues, strict=False)
        ]
        for one, other in zip(rounded, exact, strict=True)
    ]
    several = [errors_G for errors_G in errors_BG if len(errors_G) > 1]
    if not several:
        several = [[error for errors_G in errors_BG for error in errors_G]]
    squares, freedom = 0.0, 0
    for errors_G in several:
        mean = math.fsum(errors_G) / max(len(errors_G), 1)
        squares += math.fsum((error - mean) ** 2 for error in errors_G)
        freedom += len(errors_G) - 1
    return math.sqrt(squares / freedom) if freedom > 0 else 0.0


def _values(scored: Sequence[tuple[Score, ...]], *, of_steps: bool) -> list[tuple[float, ...]]:
    # Of each conversation its score, or the values of its steps; nothing where it has no score.
    return [
        () if one.value is None else one.values_K if of_steps else (one.value,)
        for scores_G in scored
        for one in scores_G
    ]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


# The scorer's spec, made from the section of the environment.

PASS_SECONDS = 300.0
"""Seconds of one forward pass in a process of its own. A slower replica is restarted, and others
score its completions."""
WHERE = "env.reward_model"
"""The name of the section in messages."""
IN_THE_SECTION = {"policy": WHERE, "policy.max_total_sequence_length": f"{WHERE}.max_model_len"}
"""The names of keys in errors about a model, for the user who wrote the section."""


def scorer_spec_of(config: RewardModelEnvironmentConfig, *, device: Device) -> ScorerSpec:
    """Convert the section into a scorer's spec.

    Raises:
        ConfigError: A setting cannot be used for a model that scores.
    """
    if config.models is None:
        return _of_source(config, config, device, ())
    # Keys that a member does not have are read from the section.
    shared = RewardModelEnvironmentConfig.model_fields.keys() - EnsemblePart.model_fields.keys()
    its_own = {f"{WHERE}.{key}": f"{WHERE}.{key}" for key in shared}
    members = []
    for index, (part, source) in enumerate(zip(config.models, config.sources, strict=True)):
        names = {WHERE: f"{WHERE}.models[{index}]", **its_own}
        mean, std = part.mean_and_std or (None, None)
        members.append(
            MemberSpec(
                name=part.name,
                spec=_of_source(source, config, device, (names,)),
                weight=part.weight,
                mean=mean,
                std=std,
            )
        )
    return ScorerSpec(
        members=tuple(members),
        combine=config.combine,
        uncertainty_penalty=config.uncertainty_penalty,
    )


def _of_source(
    source: ScorerSource,
    config: RewardModelEnvironmentConfig,
    device: Device,
    names: tuple[Names, ...],
) -> ScorerSpec:
    key = "model_name" if source.checkpoint_path is None else "checkpoint_path"
    model_name = {**IN_THE_SECTION, "policy.model_name": f"{WHERE}.{key}"}
    # Files usually repeat the name of the model in the block of the tokenizer.
    is_repeated = source.tokenizer.name in (source.model_name, source.checkpoint_path)
    server = source.server if source.asks_served_model else None
    engine = None
    if config.engine is not None and config.generation is not None and config.loads_model:
        plugin, section = config.engine
        plugin.check_installed(f"{WHERE}.generation.backend={config.generation.backend}")
        engine = ScoringEngine(plugin=plugin, section=section, may_sleep=True)
    return ScorerSpec(
        model=ModelSpec(
            name=source.checkpoint_path or source.model_name,
            trust_remote_code=source.trust_remote_code,
            safetensors_only=source.safetensors_only,
            tokenizer=source.tokenizer.model_copy(
                update={"name": None if is_repeated else source.tokenizer.name}
            ),
            head=source.reward_model_cfg,
            compile=source.compile,
            tensor_parallel_size=config.dtensor_cfg.tensor_parallel_size,
            parallel_plan=config.dtensor_cfg.custom_parallel_plan,
        ),
        tokenizer_from=None if source.checkpoint_path is None else source.model_name,
        max_length=source.max_model_len,
        batch_tokens=source.batch_tokens,
        batch_timeout=PASS_SECONDS,
        precision=source.precision,
        device=device,
        engine=engine,
        servers=source if source.urls is not None and source.judge is None else None,
        source=None if source.named is None else NamedSource(*source.named, server, source),
        num_replicas=config.num_replicas,
        in_loop=config.use_reward_loop,
        num_workers=config.num_workers if source.uses_workers else 0,
        names=(*names, model_name),
    )


def merges(scorer: Scorer) -> bool:
    """Whether a prompt is computed once even if its completions arrive in separate calls."""
    if isinstance(scorer, EnsembleScorer):
        return all(merges(member.scorer) for member in scorer.members)
    return isinstance(scorer, LoopScorer) or not isinstance(scorer, ModelScorer)


# An actor with a reward model: on a GPU of its own, or with a group of ranks beside it.

Given = RewardModelEnvironmentConfig | Mapping[str, Any]


def gpus_of_actor(
    config: Given,
    *,
    scorer: Scorer | None = None,
    device: Device = "auto",
    say: Say | None = None,
) -> float:
    """Return how many GPUs the environment's own actor needs, without its workers.

    The arguments are those of `RewardModelEnvironment`.

    Raises:
        ConfigError: The settings are invalid.
    """
    settings = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
    is_loaded = any(source.loads_model or source.loads_judge for source in settings.sources)
    is_elsewhere = scorer is not None or not is_loaded or _has_ranks(settings)
    return float(device != "cpu" and not is_elsewhere)


def make_in_actor(
    made: type[RewardModelEnvironment],
    config: Given,
    *,
    scorer: Scorer | None = None,
    device: Device = "auto",
    say: Say | None = None,
) -> RewardModelEnvironment:
    """Create the environment in an actor, with its model in several ranks if its settings say so.

    Raises:
        UserError: A setting or a model cannot be used.
    """
    settings = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
    opening = None
    if scorer is None and _has_ranks(settings):
        opening = _placement_beside(settings, device=device)
    return made(settings, scorer=scorer, device=device, opening=opening, say=say)


def _has_ranks(config: RewardModelEnvironmentConfig) -> bool:
    return config.loads_model and config.engine is None and ranks_of(config).num_ranks > 1


def ranks_of(config: RewardModelEnvironmentConfig) -> ParallelShape:
    """Return the numbers of replicas and ranks; without `resources` there is one replica.

    Raises:
        ConfigError: The number of slots is not divisible into replicas.
    """
    tp, resources = config.dtensor_cfg.tensor_parallel_size, config.resources
    if resources.gpus_per_node is None:
        return ParallelShape(tp=tp, dp_replicate=resources.num_nodes or 1)
    slots = resources.gpus_per_node * (resources.num_nodes or 1)
    if slots % tp:
        raise ConfigError(
            f"{WHERE}.dtensor_cfg.tensor_parallel_size={tp} does not divide the {slots} slots of "
            f"{WHERE}.resources"
        )
    return ParallelShape(tp=tp, dp_replicate=slots // tp)


def _placement_beside(config: RewardModelEnvironmentConfig, *, device: Device) -> ScorerPlacement:
    # Actors of the same cluster, which end with this process at the latest.
    from laurel.workers.ray_actor import GroupBeside, has_gpus
    from laurel.workers.reservations import Resources

    shape = ranks_of(config)
    each = Resources(gpus=1 if device != "cpu" and has_gpus() else 0)

    def make_group(_: str, ranks: range | None) -> MakeGroup:
        return partial(GroupBeside, ROLE, each, shape.dp_replicate, shape.tp)

    return ScorerPlacement(make_group=make_group, shape=shape, is_one_group=True)

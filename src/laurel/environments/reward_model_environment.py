"""Conversations judged by a reward model."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.data.forest import pad
from laurel.environments.cases import (
    NO_REFERENCE,
    Case,
    by_prompt,
    read_case,
    reference_of,
    score_cases,
)
from laurel.environments.interface import (
    GROUP_ID,
    ConversationMemo,
    EnvironmentInterface,
    RejectedTask,
    batch_figures,
    group_id_of,
    mean_of,
    numbers,
    settings_of,
)
from laurel.environments.load_reward_model import IN_THE_SECTION, WHERE
from laurel.environments.noise_floor import PROBE, Witnesses, noise_of
from laurel.environments.open_reward_loop import Opening
from laurel.environments.open_scorer import merges, open_scorer, statistics_of
from laurel.environments.score_transform import ScoreTransform
from laurel.errors import ConfigError, DataError, EnvironmentFailedError, speaking
from laurel.protocols import Judged, MessageLog, Scorer
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.load import Say
from laurel.rewards.local import LocalScorer, conversation_group
from laurel.rewards.loop_scorer import LoopScorer
from laurel.types import EnvironmentReturn, Group, Score, Task

if TYPE_CHECKING:
    from laurel.distributed.ray_actor import ActorMaker

__all__ = ["RewardModelEnvironment", "RewardModelEnvironmentConfig"]

PREFIX = "reward_model_env/"
"""What the names of the figures begin with."""


class _Judged(TypedDict):
    """What is remembered of a conversation until its batch has ended."""

    score: float
    truncated: bool
    parts: dict[str, float]


class RewardModelEnvironment(EnvironmentInterface):
    """Scores conversations with a reward model; each score ends its conversation.

    With `use_reward_loop` completions come while others are still being drawn: one by one where the
    scorer merges what comes together, else in parts of their group.

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
        opening: Opening | None = None,
        say: Say | None = None,
    ) -> None:
        """Load the model, and make it prove that it scores as it did when it was saved.

        What is wrong with the configuration is told before anything is loaded.

        Args:
            config: The settings; a plain dictionary is checked first.
            scorer: Used instead of a model of its own; what the settings say of one is not read.
                It is the environment's from now on, and ends with it.
            device: Where the model goes; `auto` is a GPU where there is one.
            opening: How models and processes are opened, e.g. on a cluster; None: here.
            say: Told what was loaded, found and decided; None writes it to the log.

        Raises:
            UserError: A setting, or a model, that cannot be used.
        """
        self._scorer: ContractScorer | BlockingScorer | None = None
        self.config = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
        stored = statistics_of(self.config, scorer)
        if scorer is None:
            scorer = open_scorer(self.config, device=device, say=say or _log, opening=opening)
        if isinstance(scorer, ContractScorer):
            stored = scorer.contract.rules.mean, scorer.contract.rules.std
        self.transform = ScoreTransform(self.config.transform, stored=stored)
        self._scorer = scorer if isinstance(scorer, ContractScorer) else BlockingScorer(scorer)
        self._reads_metadata: bool = getattr(scorer, "reads_metadata", False)
        self._judges_groups: bool = getattr(scorer, "judges_groups", False)
        self.judges = self._judged_by(scorer)
        self.memo: ConversationMemo[_Judged] = ConversationMemo()
        self._witnesses = Witnesses()
        self._noise: float | None = getattr(scorer, "noise", None)
        self._lock = threading.Lock()

    @classmethod
    def options(cls, **options: Any) -> ActorMaker:
        """See `EnvironmentInterface`. The actor takes a GPU where the cluster has any.

        Where `dtensor_cfg.tensor_parallel_size` or `resources` ask for more than one rank, the
        model is spread over as many actors beside it.
        """
        from laurel.distributed.ray_actor import ActorMaker
        from laurel.environments.reward_model_actor import gpus_of_actor, make_in_actor

        if cls.__init__ is not RewardModelEnvironment.__init__:  # with arguments of its own
            return ActorMaker(cls, **options)
        return ActorMaker(cls, make=partial(make_in_actor, cls), gpus=gpus_of_actor, **options)

    @property
    def tokenizer(self) -> Any:
        """The reward model's own, with the template that conversations are rendered by.

        Not to be used while another thread judges.
        """
        return self._with_contract().contract.tokenizer

    def _judged_by(self, scorer: Scorer) -> Judged:
        if not self.config.use_reward_loop:
            return "batch"
        if self._judges_groups:
            return "group"
        # What is not merged depends on itself alone: the same run gives the same scores, bit for
        # bit, and in parts a prompt is not computed for each of its completions.
        return "completion" if merges(scorer) else "part"

    # ------------------------------------------------------------------------------- judging

    def preprocess_data(self, message_logs: Sequence[MessageLog]) -> dict[str, torch.Tensor]:
        """What the model reads of conversations.

        Returns:
            `input_ids` int64 [B, L], padded on the right with the model's padding token;
            `input_lengths` int64 [B]; and `truncated` bool [B], which were cut to fit.

        Raises:
            DataError: A conversation that cannot be read or rendered.
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
        rows = pad(groups, pad_id=scorer.pad_id)
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
        """The rewards of conversations. Any number of them, from several threads at once.

        A conversation that gets no finite score is a failure, and its reward NaN. Conversations
        with the same prompt share its computation; those that say the same get the same reward.

        Args:
            message_logs: Raw messages, the policy's answer last.
            env_infos: Metadata, which comes back as it is; empty is none. Only `ground_truth` is
                read, where it is to be subtracted.
        """
        infos: list[Any] = list(env_infos or [None] * len(message_logs))
        if len(infos) != len(message_logs):
            raise ValueError(f"{len(message_logs)} conversations came with {len(infos)} metadata")
        cases = self._judge(message_logs, infos)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": c.observation} for c in cases],
            metadata=infos,
            next_stop_strings=[None] * len(cases),
            rewards=torch.tensor([case.reward for case in cases], dtype=torch.float32),
            terminateds=torch.ones(len(cases), dtype=torch.bool),
            answers=[
                case.conversation[-1].content if case.conversation else None for case in cases
            ],
            failures=[case.failure for case in cases],
        )

    def _judge(
        self, message_logs: Sequence[MessageLog], infos: Sequence[Mapping[str, Any] | None]
    ) -> list[Case]:
        cases = [read_case(log) for log in message_logs]
        for case, info in zip(cases, infos, strict=True):
            # Which group it is tells two tasks apart in the memo, and is nothing to score by.
            case.info = {key: value for key, value in (info or {}).items() if key != GROUP_ID}
            if self.config.transform.subtract_reference:
                case.add_reference(info)
        readable = [case for case in cases if case.failure is None]
        with speaking(IN_THE_SECTION):
            score_cases(
                readable,
                self._open().score_now,
                share_prompts=self._shares_prompts,
                reads_metadata=self._reads_metadata,
                judges_groups=self._judges_groups,
            )
        if self._noise is None:
            self._witnesses.add(case.conversation for case in readable if case.failure is None)
        whole = [case for case in cases if case.failure is None]
        references = [case.reference_score for case in whole]
        rewards = self.transform.rewards(
            [case.score for case in whole],
            references if self.config.transform.subtract_reference else None,
        )
        for case, reward in zip(whole, rewards, strict=True):
            if abs(reward) <= torch.finfo(torch.float32).max:
                case.reward = reward
            else:
                case.failure = "the reward is not finite"
        for log, case, info in zip(message_logs, cases, infos, strict=True):
            if case.failure is None:
                judged = _Judged(score=case.score, truncated=case.truncated, parts=case.parts)
                self.memo.put(log, judged, group_id_of(info))
        return cases

    def scores(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """What the model says of groups, before it is made a reward; nothing is remembered."""
        return self._open().score_now(groups)

    @property
    def _shares_prompts(self) -> bool:
        """Whether a group is computed as one; padded rows gain nothing, and split better alone."""
        is_padded = isinstance(self._scorer, ContractScorer) and self._scorer.path == "padded"
        return self.config.sequence_packing.share_prompts and not is_padded

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """The tasks that lack the reference answer which is to be subtracted."""
        if not self.config.transform.subtract_reference:
            return []
        return [
            RejectedTask(task=task, reason=NO_REFERENCE)
            for task in tasks
            if reference_of(task.metadata) is None
        ]

    # ------------------------------------------------------------------------------- figures

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """The batch as it is, and figures of its rewards.

        Their names begin with `reward_model_env/`. Mean, least and largest of nothing are absent,
        and so is the deviation (divided by n - 1) of fewer than two. Where this very environment
        judged every conversation of the batch: `num_truncated` and, where scores are not the
        rewards, mean and deviation of the scores; and of their parts (`Score.parts`),
        as `part/<name>/mean` and `part/<name>/std`.

        Args:
            batch: See `protocols.Environment`; any of its entries may be missing.
        """
        rewards = numbers(batch.get("rewards", ()))
        figures = batch_figures(batch) if "group_ids" in batch else {}
        samples = batch["rewards"] if "rewards" in batch else batch.get("message_log", ())
        figures["num_samples"] = float(len(samples))
        figures["num_failures"] = float(batch.get("num_failures", 0))
        figures |= _spread("reward", rewards)
        if rewards:
            figures |= {"min_reward": min(rewards), "max_reward": max(rewards)}
        if "message_log" in batch:
            found = self.memo.get_all(batch["message_log"], batch.get("group_ids"))
            judged = [one for one in found if one is not None]
            if len(judged) == len(found):
                figures["num_truncated"] = float(sum(one["truncated"] for one in judged))
                if not self.transform.changes_nothing:
                    figures |= _spread("score", [one["score"] for one in judged])
                figures |= _of_parts([one["parts"] for one in judged])
        self.transform.end_batch()
        return batch, {f"{PREFIX}{name}": value for name, value in figures.items()}

    @property
    def noise_floor(self) -> float:
        """How far apart rewards can be that mean the same: the noise of the scores, as rewards.

        Measured when it is first asked for: on the golden conversations that the model was saved
        with, or else on the first that were judged. See `measure_noise`.
        """
        with self._lock:
            if self._noise is None:
                found = self._noise_material()
                noise = noise_of(self._open(), found or PROBE)
                self._noise = noise if found else None
                return noise * self.transform.factor
            return self._noise * self.transform.factor

    def _noise_material(self) -> list[Group]:
        """Conversations to measure on, by prompt; none where there are too few."""
        scorer = self._open()
        golden = scorer.contract.rules.golden if isinstance(scorer, ContractScorer) else ()
        chosen = [entry.messages for entry in golden]
        chosen = list(dict.fromkeys(chosen if len(chosen) > 1 else self._witnesses.all()))
        return by_prompt(chosen) if len(chosen) > 1 else []

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """Give the memory of devices back meanwhile; see `ContractScorer.resting`.

        What is no model of this process or its workers is left as it is.
        """
        return self._open().resting()

    # --------------------------------------------------------------------- resuming, and the end

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as this one would, as JSON knows it."""
        return {"transform": self.transform.state_dict(), "noise": self._noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.transform.load_state_dict(state["transform"])
        self._noise = state["noise"]

    def shutdown(self) -> None:
        """Let go of the model. Idempotent.

        A model of its own finishes what is under way; what another scorer has under way fails.
        """
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()
        if isinstance(scorer, ContractScorer) and scorer.preparers is not None:
            scorer.preparers.close()
        is_here = isinstance(scorer, LocalScorer | LoopScorer)
        del scorer
        if is_here and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        """The safety net of whoever forgot `shutdown`."""
        try:  # noqa: SIM105  when a process ends, contextlib may be gone
            self.shutdown()
        except Exception:
            pass

    def _open(self) -> ContractScorer | BlockingScorer:
        scorer = self._scorer
        if scorer is None:
            raise EnvironmentFailedError("the reward-model environment was shut down")
        return scorer

    def _with_contract(self) -> ContractScorer:
        scorer = self._open()
        if not isinstance(scorer, ContractScorer):
            raise ConfigError("the scorer in use renders by itself: its tokens are not seen here")
        return scorer


def _log(line: str) -> None:
    """Write to the log; what somebody should see who waits is a warning there."""
    is_urgent = line.startswith(("warning", "waiting"))
    logging.getLogger(__name__).log(logging.WARNING if is_urgent else logging.INFO, line)


def _of_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in sorted({name for one in parts for name in one}):
        spread = _spread("", [one[name] for one in parts if name in one])
        figures |= {f"part/{name}/{key.strip('_')}": value for key, value in spread.items()}
    return figures


def _spread(what: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation under the names that figures have."""
    figures = mean_of(f"mean_{what}", values)
    if len(values) > 1:
        mean = figures[f"mean_{what}"]
        squares = math.fsum((value - mean) ** 2 for value in values)
        figures[f"std_{what}"] = math.sqrt(squares / (len(values) - 1))
    return figures

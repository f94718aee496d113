"""Conversations on their way to a reward: read, given a reference, scored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laurel.environments.noise_floor import ScoreNow
from laurel.protocols import MessageLog
from laurel.types import Completion, Conversation, Group, Message

REFERENCE = "ground_truth"
"""Where a task's metadata has its reference answer."""
NO_REFERENCE = (
    f"the metadata has no text '{REFERENCE}', and env.reward_model.transform.subtract_reference "
    "needs it"
)


@dataclass(slots=True, kw_only=True)
class Case:
    """A conversation, and its reward or the reason why it has none."""

    conversation: Conversation = ()
    reference: Conversation = ()
    """The same prompt with the task's own answer, where that is subtracted."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of its task."""
    failure: str | None = None
    score: float = math.nan
    parts: dict[str, float] = field(default_factory=dict)
    """What the score came about from; see `Score.parts`."""
    reference_score: float = math.nan
    truncated: bool = False
    reward: float = math.nan

    def add_reference(self, info: Mapping[str, Any] | None) -> None:
        """Take the task's own answer from its metadata; without one the case has failed."""
        answer = reference_of(info)
        if answer is None:
            self.failure = self.failure or NO_REFERENCE
        else:
            self.reference = (*self.conversation[:-1], Message("assistant", answer))

    @property
    def observation(self) -> str:
        """What the environment says of it."""
        if self.failure is not None:
            return f"Environment: no reward ({self.failure})"
        return f"Environment: {self.reward:.6g}"


def read_case(message_log: MessageLog) -> Case:
    """A message log as a conversation that ends with an answer, or as a failure."""
    messages: list[Message] = []
    for number, message in enumerate(message_log, start=1):
        said = message if isinstance(message, Mapping) else {}
        role, content = said.get("role"), said.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return Case(failure=f"message {number} has no role or no content that is text")
        if not _is_text(content):
            return Case(failure=f"message {number} holds half a character (a lone surrogate)")
        messages.append(Message(role, content))
    if not messages or messages[-1].role != "assistant":
        ends = f"ends with a message of {messages[-1].role!r}" if messages else "has no message"
        return Case(
            conversation=tuple(messages),
            failure=f"the conversation {ends}: there is no answer to judge",
        )
    return Case(conversation=tuple(messages))


def _is_text(content: str) -> bool:
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def reference_of(info: Mapping[str, Any] | None) -> str | None:
    """The reference answer in a task's metadata."""
    answer = (info or {}).get(REFERENCE)
    return answer if isinstance(answer, str) and _is_text(answer) else None


def score_cases(
    cases: Sequence[Case],
    score: ScoreNow,
    *,
    share_prompts: bool,
    reads_metadata: bool = False,
    judges_groups: bool = False,
) -> None:
    """Fill in the scores, or why there are none.

    What is said twice is scored once, or the order of sums would make a difference of nothing.

    Args:
        cases: None of them has failed yet.
        score: Scores groups; see `Scorer.score`.
        share_prompts: Whether conversations with the same prompt are one group.
        reads_metadata: Whether the scorer reads it: then only those with the same are.
        judges_groups: Whether it compares the completions of a group: then what is said twice is in
            it twice, and reference answers are not among them.
    """
    asked = _Asked(share_prompts, reads_metadata, judges_groups)
    places = [
        (
            asked.add(case, case.conversation),
            asked.add(case, case.reference, is_reference=True) if case.reference else None,
        )
        for case in cases
    ]
    groups = asked.groups()
    scores = score(groups) if groups else []
    for case, ((group, index), reference) in zip(cases, places, strict=True):
        found = scores[group][index]
        case.truncated, case.parts = found.truncated, dict(found.parts)
        if found.value is None:
            case.failure = found.failure or "no score"
            continue
        case.score = found.value
        if reference is not None:
            given = scores[reference[0]][reference[1]]
            if given.value is None:
                case.failure = f"the reference answer has no score: {given.failure or 'no score'}"
            else:
                case.reference_score = given.value


class _Asked:
    """Conversations on their way into groups."""

    def __init__(self, share_prompts: bool, reads_metadata: bool, judges_groups: bool) -> None:
        self._share_prompts = share_prompts
        self._reads_metadata = reads_metadata
        self._judges_groups = judges_groups
        self._row_of: dict[Any, int] = {}
        self._members: list[list[Conversation]] = []
        self._infos: list[Mapping[str, Any]] = []
        self._place_of: dict[Any, tuple[int, int]] = {}

    def add(
        self, case: Case, conversation: Conversation, *, is_reference: bool = False
    ) -> tuple[int, int]:
        """Its group, and its place there."""
        info = case.info if self._reads_metadata else {}
        key = (
            conversation[:-1] if self._share_prompts else conversation,
            json.dumps(info, sort_keys=True, default=repr) if info else "",
            is_reference and self._judges_groups,
        )
        row = self._row_of.setdefault(key, len(self._members))
        if row == len(self._members):
            self._members.append([])
            self._infos.append(info)
        place = self._place_of.get((row, conversation))
        if place is None or (self._judges_groups and not is_reference):
            place = self._place_of[row, conversation] = row, len(self._members[row])
            self._members[row].append(conversation)
        return place

    def groups(self) -> list[Group]:
        """Those that scores are asked for."""
        return [
            _group(members, row, info)
            for row, (members, info) in enumerate(zip(self._members, self._infos, strict=True))
        ]


def by_prompt(conversations: Iterable[Conversation]) -> list[Group]:
    """Different conversations as groups: those that differ in their last message only."""
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

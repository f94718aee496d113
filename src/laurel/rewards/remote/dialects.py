"""The protocols that reward servers speak, as seen by one who asks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from laurel.config.scorers import UrlProtocol as UrlProtocol
from laurel.errors import ConfigError, DataError
from laurel.models.scoring import ScoringContract
from laurel.rewards.remote import foreign_wire
from laurel.rewards.remote.replica import Reply, failed
from laurel.rewards.remote.wire import (
    SCORE_PATH,
    ScoreRequest,
    read_score_reply,
    score_request,
)
from laurel.rewards.to_tokens import Prepared, Preparing, prepared_by
from laurel.types import Conversation, Group, Score, TokenGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, and how its answer is to be read."""

    value: Any
    """JSON; None where nothing is left to be asked."""
    read: Callable[[Any], Reply]
    """Raises `ProtocolError`."""


class Dialect(ABC):
    """One protocol."""

    path: str
    """Of the endpoint, if the address does not name one; empty: the address is whole."""
    max_completions: int | None = None
    """Of one request."""
    takes_long: bool = False
    """Whether making a request would hold up an event loop: then it is made in a thread."""

    @abstractmethod
    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> Question:
        """The request for the scores of groups."""


class LaurelDialect(Dialect):
    """Our own: whole groups of messages, and a verdict on each completion."""

    path = SCORE_PATH

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> Question:
        """See `Dialect`."""
        request = ScoreRequest(groups=tuple(groups), request_id=request_id, model_version=version)

        def read(value: Any) -> Reply:
            reply = read_score_reply(value, request)
            return Reply(scores=list(reply.scores), version=reply.model_version)

        return Question(value=score_request(request), read=read)


class RenderedDialect(Dialect):
    """Whole conversations, rendered here by the model's own contract."""

    takes_long = True

    def __init__(
        self,
        path: str,
        contract: ScoringContract,
        *,
        as_text: bool,
        make: Callable[[Sequence[foreign_wire.Rendered]], Any],
        read: Callable[..., list[float]],
        preparers: Preparing | None = None,
    ) -> None:
        """Describe a protocol.

        Args:
            path: See `Dialect`.
            contract: Renders, and cuts what is too long.
            as_text: Send text, which the server tokenizes without adding to it; else token ids.
            make: The request for rows.
            read: The scores in the value of an answer; called with `count`.
            preparers: Tokenise instead; None: this process does.
        """
        self.path = path
        self._contract = contract
        self._one_at_a_time = threading.Lock()  # tokenizers are not for several threads
        self._as_text = as_text
        self._make = make
        self._read = read
        self._preparers = preparers

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> Question:
        """See `Dialect`. A conversation that cannot be rendered has failed, and is not sent.

        Raises:
            WorkerError: Too many of those who tokenise were lost.
        """
        lines = list(map(self._line, groups, self._prepared(groups)))
        rows = [row for line in lines for row, _ in line if row is not None]

        def read(value: Any) -> Reply:
            values = iter(self._read(value, count=len(rows)) if rows else ())
            return Reply(
                scores=[
                    tuple(
                        _filled(about, values) if row is not None else about for row, about in line
                    )
                    for line in lines
                ]
            )

        return Question(value=self._make(rows) if rows else None, read=read)

    def _prepared(self, groups: Sequence[Group]) -> list[Prepared]:
        if self._preparers is not None:
            return self._preparers.prepare(groups)
        with self._one_at_a_time:
            return prepared_by(self._contract, groups)

    def _line(
        self, group: Group, prepared: Prepared
    ) -> list[tuple[foreign_wire.Rendered | None, Score]]:
        """Of each completion: what is sent, and the score without its number; or the failure."""
        tokens, failures = prepared
        line: list[tuple[foreign_wire.Rendered | None, Score]] = [
            (None, failed(failure or "")) for failure in failures
        ]
        if tokens is None:
            return line
        sound = [i for i, failure in enumerate(failures) if failure is None]
        rows: Sequence[foreign_wire.Rendered] = (
            self._texts(group, sound) if self._as_text else _rows(tokens)
        )
        facts = zip(sound, rows, tokens.lengths_G, tokens.truncated_G, strict=True)
        for i, row, num_tokens, is_cut in facts:
            line[i] = row, Score(value=None, num_tokens=num_tokens, truncated=is_cut)
        return line

    def _texts(self, group: Group, sound: Sequence[int]) -> list[str]:
        with self._one_at_a_time:
            return [self._contract.render(group.conversation(i)) for i in sound]


class SingleDialect(Dialect):
    """One conversation at a time, which the server renders."""

    max_completions = 1

    def __init__(
        self,
        path: str,
        *,
        make: Callable[[Conversation], Any],
        read: Callable[[Any], float],
    ) -> None:
        """Describe a protocol; see `RenderedDialect`."""
        self.path = path
        self._make = make
        self._read = read

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> Question:
        """See `Dialect`."""
        (group,) = groups
        try:
            request = self._make(group.conversation(0))
        except DataError as error:
            verdict = Reply(scores=[(failed(str(error)),)])
            return Question(value=None, read=lambda _: verdict)

        def read(value: Any) -> Reply:
            score = self._read(value)
            return Reply(scores=[(Score(value=score, values_K=(score,)),)])

        return Question(value=request, read=read)


def _rows(tokens: TokenGroup) -> list[tuple[int, ...]]:
    trunk = tokens.trunk_ids.tolist()
    return [(*trunk, *branch.tolist()) for branch in tokens.branches_ids_G]


def _filled(about: Score, values: Any) -> Score:
    value = next(values)
    return replace(about, value=value, values_K=(value,))


def dialect_of(
    protocol: UrlProtocol,
    *,
    contract: ScoringContract | None = None,
    model: str = "",
    reward_key: str = "",
    preparers: Preparing | None = None,
) -> Dialect:
    """A protocol by its name.

    Args:
        protocol: The name.
        contract: Renders conversations, for servers that take them as text or tokens. vLLM takes
            messages as well, one conversation in a request, and renders by its own template.
        model: What the server calls the model, where it asks for that.
        reward_key: The key of the score, where slime's server answers with an object.
        preparers: Tokenise instead, where a contract renders.

    Raises:
        ConfigError: It needs a contract.
    """
    if protocol == "laurel":
        return LaurelDialect()
    if protocol == "slime":
        return SingleDialect(
            "", make=_remote_rm, read=partial(foreign_wire.read_remote_rm_reply, key=reward_key)
        )
    if contract is None:
        if protocol == "vllm":
            return SingleDialect(
                foreign_wire.CLASSIFY_PATH,
                make=partial(foreign_wire.classify_messages_request, model=model),
                read=_only_classified,
            )
        raise ConfigError(
            f"url_protocol={protocol}: its servers take rendered conversations, so name the reward "
            "model (model_name), whose template and tokenizer are used"
        )
    rows = partial(RenderedDialect, contract=contract, preparers=preparers)
    if protocol == "openrlhf":
        return rows(
            foreign_wire.GET_REWARD_PATH, as_text=True,
            make=_get_reward, read=foreign_wire.read_get_reward_reply,
        )  # fmt: skip
    make: Callable[[Sequence[foreign_wire.Rendered]], Any]
    if protocol == "vllm":
        make = partial(foreign_wire.classify_request, model=model)
        path, read = foreign_wire.CLASSIFY_PATH, foreign_wire.read_classify_reply
    elif protocol == "sglang":
        make = foreign_wire.native_classify_request
        path, read = foreign_wire.CLASSIFY_PATH, foreign_wire.read_native_classify_reply
    else:
        make = partial(foreign_wire.embeddings_request, model=model)
        path, read = foreign_wire.EMBEDDINGS_PATH, foreign_wire.read_embeddings_reply
    return rows(path, as_text=False, make=make, read=read)


def _only_classified(value: Any) -> float:
    return foreign_wire.read_classify_reply(value, count=1)[0]


def _remote_rm(conversation: Conversation) -> dict[str, Any]:
    if not conversation or conversation[-1].role != "assistant":
        raise DataError("the conversation ends with no answer of the assistant to judge")
    return foreign_wire.remote_rm_request(conversation[:-1], conversation[-1].content)


def _get_reward(rows: Sequence[foreign_wire.Rendered]) -> dict[str, Any]:
    return foreign_wire.get_reward_request([row for row in rows if isinstance(row, str)])

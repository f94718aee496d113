"""Protocols of reward servers, from the client's side; `wire` has the bodies of Laurel's own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laurel import plugins
from laurel.errors import ConfigError, DataError, ModelError
from laurel.models.scoring import ScoringContract
from laurel.plugins import AskedServers, ServerDialect
from laurel.rewards.preparing import Prepared, Preparing, prepared_by
from laurel.rewards.remote.replica import ReplicaReply, failed
from laurel.rewards.remote.wire import (
    SCORE_PATH,
    Body,
    ScoreReply,
    ScoreRequest,
)
from laurel.types import Conversation, Group, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerQuery:
    """Holds a request, and how its answer is read."""

    value: Any
    """JSON value to send; None where no completion can be sent."""
    read: Callable[[Any], ReplicaReply]
    """Converts the value of the answer; raises `ProtocolError`."""


class Dialect(ABC):
    """Defines one protocol of reward servers."""

    path: str
    """Path of the endpoint, for an address that names none; empty: the address is complete."""
    max_completions: int | None = None
    """Limit of completions in one request; None: no limit."""
    takes_long: bool = False
    """Whether building a request would block an event loop, so that a thread has to do it."""

    @abstractmethod
    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ServerQuery:
        """Build the request for the scores of groups."""


class LaurelDialect(Dialect):
    """Speaks Laurel's own protocol: whole groups of messages, and a score for each completion."""

    path = SCORE_PATH

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ServerQuery:
        """Build the request for the scores of groups."""
        request = ScoreRequest.of(groups, request_id=request_id, version=version)

        def read(value: Any) -> ReplicaReply:
            reply = ScoreReply.read(value, "the reply")
            return ReplicaReply(scores=reply.scores_of(request), version=reply.model_version)

        return ServerQuery(value=request.model_dump(exclude_unset=True), read=read)


FORGED = (
    "text: a message spells a control token, and this protocol sends text, in which the server "
    "would take it for one of the chat template's"
)


class RenderedDialect(Dialect):
    """Sends whole conversations that the model's own contract renders in this process."""

    takes_long = True

    def __init__(
        self,
        path: str,
        contract: ScoringContract,
        *,
        as_text: bool,
        make: Callable[[Sequence[Any]], Body],
        read: Callable[[Any, int], list[float]],
        preparers: Preparing | None = None,
    ) -> None:
        """Describe a protocol.

        Args:
            contract: Renders, and truncates what is too long.
            as_text: Whether to send text, which the server tokenizes without adding to it, instead
                of token ids.
            make: Builds the request for rows: texts, or lists of ids.
            read: Reads the scores of so many conversations from the value of an answer.
            preparers: Tokenise instead; None: this process does.
        """
        self.path = path
        self._contract = contract
        self._one_at_a_time = threading.Lock()  # tokenizers are not thread-safe
        self._as_text = as_text
        self._make = make
        self._read = read
        self._preparers = preparers

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ServerQuery:
        """Build a request; a conversation that cannot be rendered fails, and is not sent.

        Raises:
            WorkerError: Too many of the tokenizer workers were lost.
        """
        if self._preparers is not None:
            prepared = self._preparers.prepare(groups)
        else:
            with self._one_at_a_time:
                prepared = prepared_by(self._contract, groups)
        lines = list(map(self._line, groups, prepared))
        rows = [row for line in lines for row, _ in line if row is not None]

        def filled(facts: Score, value: float) -> Score:
            return replace(facts, value=value, values_K=(value,))

        def read(value: Any) -> ReplicaReply:
            values = iter(self._read(value, len(rows)) if rows else ())
            return ReplicaReply(
                scores=[
                    tuple(
                        facts if row is None else filled(facts, next(values)) for row, facts in line
                    )
                    for line in lines
                ]
            )

        asked = self._make(rows).model_dump(exclude_unset=True) if rows else None
        return ServerQuery(value=asked, read=read)

    def _line(self, group: Group, prepared: Prepared) -> list[tuple[Any, Score]]:
        """Return each completion's row to send, with a score to fill in, or its failure."""
        tokens, failures = prepared
        line: list[tuple[Any, Score]] = [(None, failed(failure or "")) for failure in failures]
        if tokens is None:
            return line
        sendable = [i for i, failure in enumerate(failures) if failure is None]
        if self._as_text:
            with self._one_at_a_time:
                rows: Sequence[Any] = [self._text(group.conversation(i)) for i in sendable]
        else:
            trunk = tokens.trunk_ids.tolist()
            rows = [[*trunk, *branch.tolist()] for branch in tokens.branches_ids_G]
        facts = zip(sendable, rows, tokens.lengths_G, tokens.truncated_G, strict=True)
        for i, row, num_tokens, is_cut in facts:
            if row is None:
                line[i] = None, failed(FORGED)
            else:
                line[i] = row, Score(value=None, num_tokens=num_tokens, truncated=is_cut)
        return line

    def _text(self, conversation: Conversation) -> str | None:
        # In text, nothing tells a control token of the template from one that a message spells.
        if self._contract.rules.has_plain_contents and any(
            self._contract.control_token_in(message.content) for message in conversation
        ):
            return None
        return self._contract.render(conversation)


class SingleDialect(Dialect):
    """Sends one conversation at a time, which the server renders."""

    max_completions = 1

    def __init__(
        self,
        path: str,
        *,
        make: Callable[[Conversation], Body],
        read: Callable[[Any], float],
    ) -> None:
        self.path = path
        self._make = make
        self._read = read

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ServerQuery:
        """Build the request for the score of one completion."""
        (group,) = groups
        try:
            request = self._make(group.conversation(0)).model_dump(exclude_unset=True)
        except DataError as error:
            verdict = ReplicaReply(scores=[(failed(str(error)),)])
            return ServerQuery(value=None, read=lambda _: verdict)

        def read(value: Any) -> ReplicaReply:
            score = self._read(value)
            return ReplicaReply(scores=[(Score(value=score, values_K=(score,)),)])

        return ServerQuery(value=request, read=read)


def dialect_of(
    protocol: str,
    *,
    section: Any = None,
    contract: ScoringContract | None = None,
    model: str = "",
    reward_key: str = "",
    preparers: Preparing | None = None,
) -> Dialect:
    """Return the dialect of a protocol.

    Args:
        section: Settings of that plug-in, if it has any.
        contract: Renders conversations, for servers that take text or tokens. vLLM takes messages
            as well, one conversation in a request, and renders by its own template.
        model: Name of the model on the server, where it asks for that.
        reward_key: Key of the score, where slime's server answers with an object.
        preparers: Tokenise instead, where a contract renders.

    Raises:
        ConfigError: The protocol needs a contract.
        ModelError: The contract is that of a process reward model, and the servers read one score.
    """
    plugin = plugins.find(ServerDialect, protocol)
    if plugin.rendered == "always" and contract is None:
        raise ConfigError(
            f"url_protocol={protocol}: its servers take rendered conversations, so name the reward "
            "model (model_name), whose template and tokenizer are used"
        )
    if plugin.rendered != "never" and contract is not None and contract.rules.steps is not None:
        raise ModelError(
            f"url_protocol={protocol}: the model is a process reward model, and servers of this "
            "protocol read one score of a conversation. Serve it with laurel serve, and set "
            "url_protocol=laurel"
        )
    servers = AskedServers(
        model=model, reward_key=reward_key, contract=contract, preparers=preparers
    )
    made: Dialect = plugin.make(section, servers)
    return made


def rendered(
    servers: AskedServers,
    path: str,
    *,
    as_text: bool,
    make: Callable[[Sequence[Any]], Body],
    read: Callable[[Any, int], list[float]],
) -> RenderedDialect:
    """Return the dialect of servers that are sent rendered conversations."""
    assert servers.contract is not None, "dialect_of asks for it"
    return RenderedDialect(
        path,
        servers.contract,
        as_text=as_text,
        make=make,
        read=read,
        preparers=servers.preparers,
    )

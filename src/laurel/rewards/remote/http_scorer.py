"""A reward model behind addresses, in any of the protocols that reward servers speak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from laurel.errors import ProtocolError
from laurel.models.scoring import ScoringContract
from laurel.rewards.remote.dialects import Dialect, Question, UrlProtocol, dialect_of
from laurel.rewards.remote.http_exchange import HttpExchange, checked_url
from laurel.rewards.remote.replica import Reply, failed
from laurel.rewards.remote.replica_health import Clock
from laurel.rewards.remote.router import Router
from laurel.rewards.remote.router_options import RouterOptions
from laurel.rewards.to_tokens import Preparing
from laurel.types import Completion, Conversation, Group, Score

NOT_TEXT = "text: the conversation holds half a character (a lone surrogate)"


class HttpReplica:
    """A reward server as a `Replica`."""

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        *,
        api_key: str | None = None,
        version: str = "",
        connections: int = 64,
    ) -> None:
        """Hold an address.

        Args:
            url: Of the server, or of the endpoint itself.
            dialect: What it speaks.
            api_key: Sent as a bearer token.
            version: The version of the model that is asked for, where the protocol can say that.
            connections: At most at once.

        Raises:
            ConfigError: The address cannot be used.
        """
        self._http = HttpExchange(
            endpoint(url, dialect.path), api_key=api_key, connections=connections
        )
        self._dialect = dialect
        self.version = version

    @property
    def name(self) -> str:
        """See `Replica`."""
        return self._http.name

    @property
    def max_completions(self) -> int | None:
        """See `Replica`."""
        return self._dialect.max_completions

    async def attempt(self, groups: Sequence[Group], *, request_id: str, timeout: float) -> Reply:
        """See `Replica`."""
        sound = [_sound(group) for group in groups]
        question = await self._question([one for one in sound if one.completions_G], request_id)
        version, value = "", None
        if question is not None and question.value is not None:
            answer = await self._http.post(question.value, request_id=request_id, timeout=timeout)
            version, value = answer.version, answer.value
        try:
            reply = question.read(value) if question is not None else Reply(scores=[])
        except ProtocolError as error:
            raise self._http.fault(error) from error
        rows = iter(reply.scores)
        scores = [
            _with_unsound(group, one, next(rows) if one.completions_G else ())
            for group, one in zip(groups, sound, strict=True)
        ]
        return Reply(scores=scores, version=reply.version or version)

    async def _question(self, groups: Sequence[Group], request_id: str) -> Question | None:
        if not groups:
            return None
        ask = partial(self._dialect.ask, groups, request_id=request_id, version=self.version)
        return await asyncio.to_thread(ask) if self._dialect.takes_long else ask()

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. Any answer will do but one that says that it is not well."""
        await self._http.look("/health", timeout=timeout)

    async def aclose(self) -> None:
        """See `Replica`."""
        await self._http.aclose()


class HttpScorer(Router):
    """A `Scorer` over one or several servers of the same model; see `Router`.

    Example::

        scorer = HttpScorer(["http://127.0.0.1:8000"], protocol="laurel", api_key=key)
        ((score,),) = await scorer.score([group])
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        protocol: UrlProtocol = "laurel",
        api_key: str | None = None,
        contract: ScoringContract | None = None,
        model: str = "",
        reward_key: str = "",
        preparers: Preparing | None = None,
        options: RouterOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Hold addresses; nothing is asked before the first score is.

        Args:
            urls: One for each server.
            protocol: What all of them speak.
            api_key: Sent as a bearer token.
            contract: See `dialect_of`.
            model: Likewise.
            reward_key: Likewise.
            preparers: Likewise. Whoever closes the scorer closes them (`close_scorer`).
            options: See `RouterOptions`.
            clock: Seconds; monotonic.

        Raises:
            ConfigError: An address or a protocol that cannot be used.
        """
        options = options or RouterOptions()
        self.preparers = preparers
        dialect = dialect_of(
            protocol, contract=contract, model=model, reward_key=reward_key, preparers=preparers
        )
        super().__init__(
            [
                HttpReplica(
                    url, dialect,
                    api_key=api_key, version=options.version, connections=options.window + 2,
                )
                for url in dict.fromkeys([urls] if isinstance(urls, str) else urls)
            ],
            options,
            clock=clock,
        )  # fmt: skip


def endpoint(url: str, path: str) -> str:
    """The address of an endpoint, from that of its server or from its own."""
    found = checked_url(url)
    own = found.path.rstrip("/")
    if not path or own.endswith(path):
        return str(found)
    return str(found.copy_with(path=own + path))


def _is_text(conversation: Conversation) -> bool:
    try:
        for message in conversation:
            message.content.encode()
            message.role.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sound(group: Group) -> Group:
    """Without the completions that cannot be sent as text."""
    if not _is_text(group.prompt):
        return Group(id=group.id, prompt=(), completions_G=())
    sound = tuple(one for one in group.completions_G if _is_text(one.messages))
    if len(sound) == len(group.completions_G):
        return group
    return Group(id=group.id, prompt=group.prompt, completions_G=sound)


def _with_unsound(group: Group, sound: Group, scores: Sequence[Score]) -> tuple[Score, ...]:
    """The scores of a group, with failures where nothing was sent."""
    sent: set[int] = set(map(id, sound.completions_G))
    left = iter(scores)

    def verdict(one: Completion) -> Score:
        return next(left) if id(one) in sent else failed(NOT_TEXT)

    return tuple(verdict(one) for one in group.completions_G)

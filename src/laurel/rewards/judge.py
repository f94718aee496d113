"""A language model behind an OpenAI-compatible endpoint, as a scorer."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from laurel.config.scorers import JudgeConfig
from laurel.errors import DataError, ProtocolError
from laurel.rewards.judge_prompt import JudgePrompt, NoScoreError, read_verdict
from laurel.rewards.remote.expected import expect_list, expect_object
from laurel.rewards.remote.http_exchange import HttpExchange, checked_url
from laurel.rewards.remote.http_scorer import endpoint
from laurel.rewards.remote.replica import Reply, failed
from laurel.rewards.remote.replica_health import Clock
from laurel.rewards.remote.router import Router
from laurel.rewards.remote.router_options import RouterOptions
from laurel.types import Group, Score

CHAT_PATH = "/chat/completions"


class JudgeReplica:
    """One server of a judge, as a `Replica`."""

    max_completions = 1
    """Of one request; it takes several replies, though."""

    def __init__(
        self, url: str, config: JudgeConfig, prompt: JudgePrompt, *, api_key: str | None = None
    ) -> None:
        """Hold an address.

        Args:
            url: Of the server, of its `/v1`, or of the endpoint itself.
            config: How it is asked.
            prompt: What it is asked.
            api_key: Sent as a bearer token.

        Raises:
            ConfigError: The address cannot be used.
        """
        path = CHAT_PATH if "/v1" in checked_url(url).path else f"/v1{CHAT_PATH}"
        # All replies that may be awaited at once, or some would wait in their own time.
        connections = RouterOptions().window * config.num_samples + 2
        self._http = HttpExchange(endpoint(url, path), api_key=api_key, connections=connections)
        self._config = config
        self._prompt = prompt
        self.counts: Counter[str] = Counter()
        """`replies`, and `unreadable` ones among them."""

    @property
    def name(self) -> str:
        """See `Replica`."""
        return self._http.name

    async def attempt(self, groups: Sequence[Group], *, request_id: str, timeout: float) -> Reply:
        """See `Replica`. A reply without a score is not asked for again: it would say the same."""
        return Reply(
            scores=[
                tuple(
                    [
                        await self._judged(group, index, request_id, timeout)
                        for index in range(len(group.completions_G))
                    ]
                )
                for group in groups
            ]
        )

    async def _judged(self, group: Group, index: int, request_id: str, timeout: float) -> Score:
        try:
            messages = self._prompt.messages(group, index)
            messages_as_text = "".join(message["content"] for message in messages)
            messages_as_text.encode()
        except UnicodeEncodeError:
            return failed("text: the conversation holds half a character (a lone surrogate)")
        except DataError as error:
            return failed(f"error: {error}")
        asked = [
            asyncio.create_task(self._reply(messages, number, request_id, timeout))
            for number in range(self._config.num_samples)
        ]
        try:
            replies = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        return self._verdict(replies)

    async def _reply(
        self, messages: list[dict[str, str]], number: int, request_id: str, timeout: float
    ) -> float | NoScoreError:
        """One reply's score, or why it has none."""
        config = self._config
        request: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        if config.seed is not None:
            request["seed"] = config.seed + number
        answer = await self._http.post(
            request | config.extra_body, request_id=f"{request_id}-{number}", timeout=timeout
        )
        try:
            return read_verdict(_said(answer.value), config)
        except NoScoreError as error:
            return error
        except ProtocolError as error:
            raise self._http.fault(error) from error

    def _verdict(self, replies: Sequence[float | NoScoreError]) -> Score:
        values = [one for one in replies if not isinstance(one, NoScoreError)]
        unreadable = [one for one in replies if isinstance(one, NoScoreError)]
        self.counts["replies"] += len(replies)
        self.counts["unreadable"] += len(unreadable)
        if len(values) < self._config.min_samples:
            of = f"{len(values)} of {len(replies)} replies have a score"
            return failed(f"reply: {of}: {unreadable[-1]}")
        mean = math.fsum(values) / len(values)
        parts: dict[str, float] = {}
        if len(replies) > 1:
            squares = math.fsum((value - mean) ** 2 for value in values)
            parts = {
                "unreadable": float(len(unreadable)),
                "spread": math.sqrt(squares / len(values)),
            }
        return Score(value=mean, values_K=(mean,), parts=parts)

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. Any answer will do but one that says that it is not well."""
        await self._http.look("/health", timeout=timeout)

    async def aclose(self) -> None:
        """See `Replica`."""
        await self._http.aclose()


class JudgeScorer(Router):
    """A `Scorer` that asks a judge, at one address or at several that serve the same; see `Router`.

    The score of a completion is the mean over `num_samples` replies, of which at least
    `min_samples` must have one. Example::

        config = JudgeConfig(urls=["http://127.0.0.1:8000"], model="judge")
        ((score,),) = await JudgeScorer(config).score([group])
    """

    reads_metadata = True
    noise = 0.0
    """What a judge draws differs by far more than rounding does; that is for `num_samples`."""

    def __init__(
        self,
        config: JudgeConfig,
        *,
        api_key: str | None = None,
        where: str = "env.reward_model.judge",
        clock: Clock = time.monotonic,
    ) -> None:
        """Hold addresses; nothing is asked before the first score is.

        Args:
            config: See there.
            api_key: Sent as a bearer token.
            where: The section, for messages.
            clock: Seconds; monotonic.

        Raises:
            ConfigError: An address or a template that cannot be used.
        """
        prompt = JudgePrompt(config, where=where)
        self.judges = [JudgeReplica(url, config, prompt, api_key=api_key) for url in config.urls]
        """One for each address."""
        options = RouterOptions(
            timeout=config.request_timeout,
            attempt_timeout=config.attempt_timeout,
            completions_per_request=1,
            hedge=config.hedge,
        )
        super().__init__(self.judges, options, clock=clock)


def _said(value: Any) -> str:
    """The text of a chat completion.

    Raises:
        ProtocolError: It is none.
        NoScoreError: It says nothing, or was cut off, perhaps in the middle of a number.
    """
    choices = expect_list(expect_object(value, "the answer").get("choices"), "choices")
    if not choices:
        raise ProtocolError("choices is empty")
    choice = expect_object(choices[0], "a choice")
    if choice.get("finish_reason") == "length":
        raise NoScoreError("the reply was cut off: raise max_tokens")
    text = expect_object(choice.get("message"), "the message of a choice").get("content")
    if not isinstance(text, str):
        raise NoScoreError("the reply says nothing")
    return text

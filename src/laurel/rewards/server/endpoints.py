"""What is done with each request that the gate lets in: the body in, the answer out.

Bodies are read by `wire` and `foreign_wire`, not by a validator, which would take longer than all
the rest; `description` says the same for people and generated clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

from laurel.errors import ProtocolError, UserError
from laurel.rewards.remote import foreign_wire
from laurel.rewards.remote.expected import MISSING, expect_object, expect_text
from laurel.rewards.remote.replica import failed, reason_of
from laurel.rewards.remote.wire import (
    ScoreReply,
    ScoreRequest,
    dump,
    has_more_values,
    parse,
    read_score_request,
    score_reply,
)
from laurel.rewards.server.gate import Call
from laurel.rewards.server.metrics import ServerMetrics
from laurel.rewards.server.serving import (
    Answer,
    AnswerMemory,
    RefusedRequestError,
    RewardService,
    Scored,
)
from laurel.types import Group, Score

_OF_THE_REQUEST = ("4xx", "poison", "text", "other")
"""Reasons of failures for which another try would be in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How much one request may ask."""

    completions: int = 4096
    groups: int = 4096
    """Also of those without a completion: each takes time to read."""
    messages: int = 65_536
    """Of all conversations together."""
    values: int = 2**20
    """Numbers, texts, lists and objects of its JSON: token ids, above all."""
    characters: int = 200_000
    """Of one conversation; a longer one has failed, and the others are scored."""


_LARGE_BODY = 2**18
"""Bytes that are read in some milliseconds."""
_READERS = 2
"""Large bodies that are read at a time: more would only take longer each."""
Request = TypeVar("Request")


class Endpoints:
    """The handlers. Each takes a call and gives an answer, or raises what becomes an error."""

    figures: ServerMetrics

    def __init__(self, service: RewardService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._answers = AnswerMemory()
        self._reading = asyncio.Semaphore(_READERS)

    # -------------------------------------------------------------------------------- scores

    async def score(self, call: Call) -> Answer:
        """Our own: whole groups; or vLLM's, which is known by its keys."""
        request = await self._read(call, _read_either_score_request)
        if isinstance(request, foreign_wire.ForeignRequest):
            return await self._pairs(call, request)

        async def answer() -> Answer:
            scored = await self._scored(call, request.groups, version=request.model_version)
            reply = ScoreReply(
                scores=tuple(scored.scores), model=scored.model.name,
                model_version=scored.model.version, request_id=request.request_id,
            )  # fmt: skip
            return _answer(score_reply(request.groups, reply), scored)

        return await self._once(call, request.request_id, answer)

    async def classify(self, call: Call) -> Answer:
        """vLLM's, and SGLang's of the same name."""
        request = await self._read(call, foreign_wire.read_classify_request)

        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            counts = [score.num_tokens for score in scores]
            values = _maybe_squashed(scores, request)
            if request.is_native:
                is_list = request.is_list
                reply = foreign_wire.native_classify_reply(values, counts, is_list=is_list)
                return _answer(reply, scored)
            reply = foreign_wire.classify_reply(
                values, request_id=call.request_id, created=int(time.time()),
                model=scored.model.name, num_tokens=sum(counts),
            )  # fmt: skip
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def pooling(self, call: Call) -> Answer:
        """vLLM's; of a reward model it gives what `/classify` gives."""
        request = await self._read(call, foreign_wire.read_pooling_request)

        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            with _in_float32():
                reply = foreign_wire.pooling_reply(
                    _maybe_squashed(scores, request), as_base64=request.as_base64,
                    request_id=call.request_id, created=int(time.time()),
                    model=scored.model.name, num_tokens=_num_tokens(scores),
                )  # fmt: skip
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def pairs(self, call: Call) -> Answer:
        """vLLM's `/score`: queries, which the user says, and documents, which are the answers."""
        return await self._pairs(call, await self._read(call, _read_pairs_request))

    async def _pairs(self, call: Call, request: foreign_wire.ForeignRequest) -> Answer:
        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            reply = foreign_wire.pairs_reply(
                _maybe_squashed(scores, request), request_id=call.request_id,
                created=int(time.time()), model=scored.model.name, num_tokens=_num_tokens(scores),
            )  # fmt: skip
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def embeddings(self, call: Call) -> Answer:
        """SGLang's form of OpenAI's."""
        request = await self._read(call, foreign_wire.read_embeddings_request)

        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            with _in_float32():
                reply = foreign_wire.embeddings_reply(
                    [_number(score) for score in scores], model=scored.model.name,
                    num_tokens=_num_tokens(scores), as_base64=request.as_base64,
                )  # fmt: skip
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def get_reward(self, call: Call) -> Answer:
        """OpenRLHF's."""
        request = await self._read(call, foreign_wire.read_get_reward_request)

        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            values = [_number(score) for score in scores]
            return _answer(foreign_wire.get_reward_reply(values), scored)

        return await self._once(call, "", answer)

    async def remote_rm(self, call: Call) -> Answer:
        """slime's; `?rendered=1` or `0` says whether a prompt that is a text has been rendered."""
        said = parse_qs(call.query).get("rendered")
        is_rendered = None if said is None else said[-1] in ("1", "true")
        request = await self._read(
            call, partial(foreign_wire.read_remote_rm_request, rendered=is_rendered)
        )

        async def answer() -> Answer:
            scores, scored = await self._values(call, request)
            return _answer(_number(scores[0]), scored)

        return await self._once(call, "", answer)

    async def _read(self, call: Call, read: Callable[[Any], Request]) -> Request:
        """The request in a body. A large one is read beside the event loop, for others wait there.

        Raises:
            ProtocolError: It is none.
            RefusedRequestError: It has too many groups, messages or values.
        """

        def work() -> Request:
            value = parse(call.body)
            self._check_counts(value)
            return read(value)

        def work_beside() -> Request:
            # Parsing is one step for all other threads, so its length is bounded first.
            if has_more_values(call.body, self._limits.values):
                message = f"a request has {self._limits.values:,} numbers, texts and lists at most"
                raise RefusedRequestError(413, "size", message)
            return work()

        if len(call.body) <= _LARGE_BODY:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work_beside)

    def _check_counts(self, value: Any) -> None:
        """Refuse what would take long to read, by its lists alone; other faults are found later."""
        limits = self._limits
        groups = value.get("groups") if isinstance(value, dict) else None
        groups = groups if isinstance(groups, list) else [value]
        if len(groups) > limits.groups:
            raise RefusedRequestError(
                413, "size", f"a request has {limits.groups:,} groups at most"
            )
        if isinstance(value, dict) and any(
            len(rows) > limits.completions for key, rows in value.items() if _are_rows(key, rows)
        ):
            raise self._too_many_completions()
        if sum(map(_num_messages, groups)) > limits.messages:
            message = f"a request has {limits.messages:,} messages at most"
            raise RefusedRequestError(413, "size", message)

    def _too_many_completions(self) -> RefusedRequestError:
        message = f"a request has {self._limits.completions:,} completions at most"
        return RefusedRequestError(413, "size", message)

    async def _once(
        self, call: Call, request_id: str, answer: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """An answer; the same one where the client has named its request and asks again."""
        request_id = request_id or call.headers.get(b"x-request-id", b"").decode("latin-1")
        if not request_id:
            return await answer()
        asked = f"{call.path}?{call.query}\0".encode() + call.body
        digest = hashlib.blake2b(asked, digest_size=16).digest()
        return await self._answers.once(request_id, digest, answer)

    async def _values(
        self, call: Call, request: foreign_wire.ForeignRequest
    ) -> tuple[Sequence[Score], Scored]:
        """The scores of a request that has no place for a failure: all, or an error."""
        scored = await self._scored(call, request.groups or [request.rendered])
        scores = [score for scores_G in scored.scores for score in scores_G]
        for index, score in enumerate(scores):
            if score.failure is not None:
                message = f"conversation {index}: {score.failure}"
                if reason_of(score.failure) in _OF_THE_REQUEST:
                    raise RefusedRequestError(422, "failed", message)
                raise RefusedRequestError(503, "failed", message, retry_after=1.0)
        return scores, scored

    async def _scored(self, call: Call, groups: Sequence[Group], *, version: str = "") -> Scored:
        call.completions = sum(len(group.completions_G) for group in groups)
        if call.completions > self._limits.completions:
            raise self._too_many_completions()
        too_long: Mapping[tuple[int, int], Score] = {}
        if len(call.body) > self._limits.characters:
            groups, too_long = _without_too_long(groups, self._limits.characters)
        scored = await self._service.score(groups, version=version)
        if too_long:
            scored = replace(scored, scores=_with(scored.scores, too_long))
        failures = [
            score.failure
            for scores_G in scored.scores
            for score in scores_G
            if score.failure is not None
        ]
        if failures:
            call.failures = len(failures)
            self.figures.note_failures(map(reason_of, failures))
        return scored

    # --------------------------------------------------------------------------------- looks

    async def health(self, call: Call) -> Answer:
        """That it lives, and can still become ready."""
        return Answer(b"{}", status=503 if self._service.is_lost else 200)

    async def ready(self, call: Call) -> Answer:
        """Whether it takes requests."""
        state, body = self._state()
        served = self._service.served
        return Answer(
            body, status=200 if state == "ready" else 503, version=served.version if served else ""
        )

    async def models(self, call: Call) -> Answer:
        """The model, in OpenAI's form."""
        served = self._service.served
        about = [] if served is None else [
            {"id": served.name, "object": "model", "owned_by": "laurel", "version": served.version}
        ]  # fmt: skip
        return Answer(dump({"object": "list", "data": about}))

    async def metrics(self, call: Call) -> Answer:
        """Figures for Prometheus."""
        return Answer(self.figures.text(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    def _state(self) -> tuple[str, bytes]:
        state, served = self._service.state, self._service.served
        about = {"model": served.name, "model_version": served.version} if served else {}
        return state, dump({"state": state, **about})

    # ---------------------------------------------------------------------------------- admin

    async def sleep(self, call: Call) -> Answer:
        """Give memory back."""
        await self._service.sleep()
        return Answer(self._state()[1])

    async def wake(self, call: Call) -> Answer:
        """Take requests again."""
        await self._service.wake()
        return Answer(self._state()[1])

    async def load(self, call: Call) -> Answer:
        """Serve another model."""
        asked = expect_object(parse(call.body), "the request")
        name = expect_text(asked.get("model", MISSING), "'model', the directory,")
        try:
            await self._service.load(name)
        except (UserError, OSError) as error:
            raise RefusedRequestError(422, "model", str(error)) from error
        return Answer(self._state()[1])


def _answer(value: Any, scored: Scored) -> Answer:
    return Answer(dump(value), version=scored.model.version)


def _read_either_score_request(value: Any) -> ScoreRequest | foreign_wire.ForeignRequest:
    return (
        _read_pairs_request(value) if foreign_wire.names_pairs(value) else read_score_request(value)
    )


def _read_pairs_request(value: Any) -> foreign_wire.ForeignRequest:
    try:
        return foreign_wire.read_pairs_request(value)
    except ProtocolError as error:
        if error.kind != "count":
            raise
        raise RefusedRequestError(422, "count", str(error)) from error


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        message = "a score is beyond float32, which base64 is of; ask for 'encoding_format' float"
        raise RefusedRequestError(422, "failed", message) from error


def _maybe_squashed(scores: Sequence[Score], request: foreign_wire.ForeignRequest) -> list[float]:
    values = [_number(score) for score in scores]
    return [foreign_wire.sigmoid(one) for one in values] if request.squashed else values


def _num_tokens(scores: Sequence[Score]) -> int:
    return sum(score.num_tokens for score in scores)


def _number(score: Score) -> float:
    assert score.value is not None, "failures have been refused"
    return score.value


def _without_too_long(
    groups: Sequence[Group], most: int
) -> tuple[list[Group], dict[tuple[int, int], Score]]:
    """Groups without the conversations that are too long, and the verdicts on those."""
    left, found = [], {}
    for row, group in enumerate(groups):
        kept = []
        said = sum(len(message.content) for message in group.prompt)
        for index, completion in enumerate(group.completions_G):
            length = said + sum(len(message.content) for message in completion.messages)
            if length > most:
                reason = f"4xx: {length:,} characters; a conversation has {most:,} at most"
                found[row, index] = failed(reason)
            else:
                kept.append(completion)
        left.append(replace(group, completions_G=tuple(kept)))
    return left, found


def _with(
    scores: Sequence[Sequence[Score]], too_long: Mapping[tuple[int, int], Score]
) -> list[tuple[Score, ...]]:
    """Scores, with further verdicts in their places."""
    found = list(map(list, scores))
    for (row, index), score in sorted(too_long.items(), key=lambda item: item[0]):
        found[row].insert(index, score)
    return list(map(tuple, found))


def _are_rows(key: str, value: Any) -> bool:
    """Whether what a request has under a key is a list with an entry for each conversation; one of
    numbers is the token ids of a single one."""
    if key in ("groups", "messages", "prompt") or not isinstance(value, list) or not value:
        return False
    return not isinstance(value[0], int | float)


def _num_messages(group: Any) -> int:
    """Messages of a group of ours or of a request that is one conversation, as far as they are."""
    if not isinstance(group, dict):
        return 0
    lists = [group.get(key) for key in ("prompt", "messages")]
    completions = group.get("completions")
    lists += completions if isinstance(completions, list) else []
    return sum(len(one) for one in lists if isinstance(one, list))

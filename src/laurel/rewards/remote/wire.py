"""The bodies between a reward server and its clients: strict JSON, and Laurel's own endpoint.

`POST /v1/score` takes whole groups::

    {"groups": [{"id": "g1", "prompt": [{"role": "user", "content": "2 + 2?"}],
                 "completions": [[{"role": "assistant", "content": "4"}], ...]}, ...],
     "request_id": "...",        optional; comes back
     "model_version": "..."}     optional; another version answers 409

and gives, in the same order and with the same ids::

    {"groups": [{"id": "g1", "scores": [{"value": 1.5, "values": [1.5], "num_tokens": 12,
                                         "truncated": false, "failure": null}, ...]}, ...],
     "model": "...", "model_version": "...", "request_id": "..."}

A score that was combined from several numbers has them by name, too: `"parts": {"kind": 0.5}`. A
completion without a score has `"value": null` and a reason in `failure`, and the others are not
affected. Instead of messages a prompt may be a text, of the user, and a completion a text, of the
assistant; `preparing` says how rendered conversations are sent. An error is `{"error": {"code":
"...", "message": "..."}}`.

The models below are the only definition of each body: the server reads and documents requests with
them, and the client reads its answers. The formats of other programs are in `foreign`.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from laurel.data.sources import json_kind
from laurel.errors import ProtocolError
from laurel.types import Completion, Conversation, Group, Message, Score

MAX_DEPTH = 16
"""Limit of nested objects and lists in a body."""

SCORE_PATH = "/v1/score"
VERSION_HEADER = "X-Model-Version"
"""Header of every answer of a reward server."""


def parse(body: bytes) -> Any:
    """Parse a JSON text without NaN, infinities, repeated keys, or bytes that are not UTF-8.

    Raises:
        ProtocolError: It is not such a text.
    """
    # pydantic's own parser takes the last of two equal keys, NaN, and any depth, so values are
    # parsed here and validated by the models afterwards.
    try:
        found = json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
    except ProtocolError:
        raise
    except RecursionError:
        raise ProtocolError(_TOO_DEEP) from None
    except ValueError as error:
        raise ProtocolError(f"not the expected JSON: {error}") from error
    _check_depth(body)
    return found


_TOO_DEEP = f"the JSON is nested more than {MAX_DEPTH} deep"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))


def _check_depth(body: bytes) -> None:
    # Level by level from the inside: an empty pair of brackets is removed in each round.
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKET)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = re.sub(rb"\[\]|\{\}", b"", brackets)
    if brackets:
        raise ProtocolError(_TOO_DEEP)


def dump(value: Any) -> bytes:
    """Return the JSON text of a value.

    Raises:
        ValueError: A number in it is not finite.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _refuse_constant(name: str) -> None:
    raise ProtocolError(f"{name} is no JSON", kind="nan")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("an object has the same key twice")
    return found


Wanted = TypeVar("Wanted")
Item = TypeVar("Item")

List = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong entry is reported, and not a million of them."""


class TooLargeError(ProtocolError):
    """Raised for a body that is larger than one request may be."""


class Body(BaseModel):
    """Base of all bodies: JSON's own types, never converted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def read(cls, value: Any, what: str = "the request") -> Self:
        """Validate a JSON value as this body.

        Raises:
            ProtocolError: The value does not match this body; the message says where and why.
        """
        return validated(cls.model_validate, value, what)


def validated(
    read: Callable[..., Wanted], value: Any, what: str = "the request", **context: Any
) -> Wanted:
    """Validate the value of a JSON text as a body.

    Args:
        read: A model's `model_validate`, or a type's `validate_python`.
        what: Name of the body in messages.

    Raises:
        ProtocolError: It is not such a body; says where and why.
    """
    try:
        return read(value, context=context)
    except ValidationError as error:
        raise _as_protocol_error(error, value, what) from None


def _as_protocol_error(error: ValidationError, value: Any, what: str) -> ProtocolError:
    """Report the innermost error: where several forms are allowed, that of the best match."""
    errors = error.errors(include_url=False)
    depth = max(len(one["loc"]) for one in errors)
    inner = [one for one in errors if one["type"] == "too_long"]
    inner = inner or [one for one in errors if len(one["loc"]) == depth]
    # Of a misspelled key and the right one, which is missing, the misspelled one is named.
    inner = [one for one in inner if one["type"] == "extra_forbidden"] or inner
    kind, steps = inner[0]["type"], inner[0]["loc"]
    is_of_key = kind in ("missing", "extra_forbidden")
    key = str(steps[-1])[:_KEY_SHOWN] if is_of_key else ""
    path, at = "", value
    for step in steps[:-1] if is_of_key else steps:
        if isinstance(at, list) and isinstance(step, int) and step < len(at):
            path, at = f"{path}[{step}]", at[step]
        elif isinstance(at, dict) and step in at:
            path, at = f"{path}.{step}".removeprefix("."), at[step]
        # Otherwise the step is the name of one of several forms, and not in the value.
    where = f"{path!r} of {what}" if path else what
    if kind == "extra_forbidden":
        place = re.sub(r"\[\d+\]", "[]", path)
        known = list(_KEYS_AT.get(place, MessageBody.__annotations__))
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}? Its" if near else "its"
        keys = ", ".join(known)
        return ProtocolError(f"{where} has an unknown key {key!r}; {hint} keys are: {keys}")
    if kind == "missing":
        full = f"{path}.{key}".removeprefix(".")
        there = [str(one)[:_KEY_SHOWN] for one in islice(at, 100)] if isinstance(at, dict) else []
        near = get_close_matches(key, there, n=1)
        hint = f"; did you mean {key!r} by {near[0]!r}?" if near else ""
        return ProtocolError(f"{full!r} of {what} is missing{hint}")
    if kind == "finite_number" or (kind == "float_type" and type(at) is int):  # 10**400
        return ProtocolError(f"{where} is not finite", kind="nan")
    problem = " or ".join(dict.fromkeys(_WORDS.get(one["type"], one["msg"]) for one in inner))
    problem = problem.replace("Input should", "should").replace(" or should be", " or")
    if kind == "too_long":
        return TooLargeError(f"{where} {problem}")
    if kind == "count":
        return ProtocolError(f"{where} has {problem}", kind="count")
    if kind == "values":
        return ProtocolError(f"{where} {problem}")
    return ProtocolError(f"{where} {problem}, and is {json_kind(at)}")


# pydantic's own messages for these name Python's types.
_WORDS = {
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
}
_KEY_SHOWN = 64
"""Limit of characters of a client's key in a message."""


# A dictionary and no model: 65,536 models are made in one step of 160 ms, in which no other thread
# runs and /health waits; dictionaries in 30 ms.
@with_config(ConfigDict(strict=True, extra="forbid"))
class MessageBody(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


MOST_ROWS = 4096
"""Limit of conversations and groups in one request; each takes time to read, even if it is
empty.
"""
Messages = Annotated[List[MessageBody], Field(max_length=65_536)]


def messages_of(conversation: Conversation) -> list[MessageBody]:
    """Convert a conversation into its body."""
    return [{"role": one.role, "content": one.content} for one in conversation]


def conversation_of(messages: str | Sequence[MessageBody], *, role: str) -> Conversation:
    """Convert messages, or a text of `role`, into a conversation."""
    if isinstance(messages, str):
        return (Message(role, messages),)
    return tuple(Message(one["role"], one["content"]) for one in messages)


class GroupBody(Body, extra="forbid"):
    """A prompt and its completions; texts are of the user and of the assistant."""

    id: str
    prompt: str | Messages
    completions: Annotated[
        List[str | Annotated[Messages, Field(min_length=1)]], Field(max_length=MOST_ROWS)
    ]


class ScoringRequest(Body):
    """Base of bodies that ask for scores."""

    @property
    @abstractmethod
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""


class ScoreRequest(ScoringRequest, extra="forbid"):
    """The request of `/v1/score`."""

    groups: Annotated[List[GroupBody], Field(max_length=MOST_ROWS)]
    request_id: str = ""
    """Comes back in the answer; a request with the same id gets the same answer."""
    model_version: str = ""
    """The required version of the model; empty: any."""

    @classmethod
    def of(cls, groups: Sequence[Group], *, request_id: str = "", version: str = "") -> Self:
        """Build the request for the scores of groups."""
        named = {"request_id": request_id, "model_version": version}
        bodies = [
            GroupBody(
                id=group.id,
                prompt=messages_of(group.prompt),
                completions=[messages_of(one.messages) for one in group.completions_G],
            )
            for group in groups
        ]
        return cls(groups=bodies, **{key: value for key, value in named.items() if value})

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""
        return [
            Group(
                id=group.id,
                prompt=conversation_of(group.prompt, role="user"),
                completions_G=tuple(
                    Completion(messages=conversation_of(one, role="assistant"))
                    for one in group.completions
                ),
            )
            for group in self.groups
        ]


# The keys of the bodies that refuse others, by their places; those of messages are elsewhere.
_KEYS_AT = {"": ScoreRequest.model_fields, "groups[]": GroupBody.model_fields}


class ScoreBody(Body):
    """The score of one completion: a number, or the reason why there is none."""

    value: float | None = None
    values: List[float] = Field(default_factory=list)
    num_tokens: int = Field(ge=0)
    truncated: bool
    failure: str | None = None
    parts: dict[str, float] = Field(
        default_factory=dict,  # older servers do not send them
        exclude_if=lambda parts: not parts,
        description="Numbers that the value was combined from, by name",
    )

    @classmethod
    def of(cls, score: Score) -> Self:
        """Convert a score into its body."""
        return cls(
            value=score.value,
            values=list(score.values_K),
            num_tokens=score.num_tokens,
            truncated=score.truncated,
            failure=score.failure,
            **({"parts": dict(score.parts)} if score.parts else {}),
        )

    def as_score(self) -> Score:
        """Convert the body into a score.

        Raises:
            ProtocolError: It has neither a value nor a failure, or both.
        """
        has_failed = self.failure is not None
        if has_failed == (self.value is not None):
            has = "both a value and" if has_failed else "neither a value nor"
            raise ProtocolError(f"a score has {has} a failure")
        return Score(
            value=self.value,
            values_K=() if has_failed else tuple(self.values),
            num_tokens=self.num_tokens,
            truncated=self.truncated,
            failure=(self.failure or "no reason was given") if has_failed else None,
            parts=self.parts,
        )


class ScoredGroup(Body):
    """The scores of the completions of one group, in their order."""

    id: str
    scores: List[ScoreBody]


class ScoreReply(Body):
    """The answer of `/v1/score`."""

    groups: List[ScoredGroup]
    model: str
    model_version: str
    """Version of the model that gave all scores."""
    request_id: str = Field(default="", exclude_if=lambda request_id: not request_id)

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Sequence[Sequence[Score]], **about: str) -> Self:
        """Build the answer to a request for groups, in the order of their scores."""
        scored = [
            ScoredGroup(id=group.id, scores=list(map(ScoreBody.of, scores_G)))
            for group, scores_G in zip(groups, scores, strict=True)
        ]
        return cls(groups=scored, **about)

    def scores_of(self, request: ScoreRequest) -> list[tuple[Score, ...]]:
        """Check the answer to a request, and return all of its scores.

        Raises:
            ProtocolError: Count, order, ids or version differ from the request's.
        """
        version, wanted = self.model_version, request.model_version
        if wanted and version != wanted:
            message = f"scores of version {version!r}; the request asked for {wanted!r}"
            raise ProtocolError(message, kind="version")
        if self.request_id != request.request_id:
            message = f"the reply is to request {self.request_id!r}, not {request.request_id!r}"
            raise ProtocolError(message)
        if len(self.groups) != len(request.groups):
            message = f"{len(self.groups)} groups came back of {len(request.groups)}"
            raise ProtocolError(message, kind="count")
        for found, group in zip(self.groups, request.groups, strict=True):
            if found.id != group.id:
                raise ProtocolError(f"group {found.id!r} came back in the place of {group.id!r}")
            if len(found.scores) != len(group.completions):
                raise ProtocolError(
                    f"{len(found.scores)} scores came back for the {len(group.completions)} "
                    f"completions of group {group.id!r}",
                    kind="count",
                )
        return [tuple(one.as_score() for one in group.scores) for group in self.groups]


class ErrorFacts(Body):
    """The error: a code for programs, and a message for people."""

    code: str
    message: str


class ErrorBody(Body):
    """The body of every error of the server."""

    error: ErrorFacts


def read_error(value: Any) -> str:
    """Return the message of an error, of Laurel's server or another; empty if it has none."""
    if not isinstance(value, dict):
        return ""
    error = value.get("error", value.get("detail", value.get("message", "")))
    if isinstance(error, dict):
        error = error.get("message", "")
    return error if isinstance(error, str) else ""

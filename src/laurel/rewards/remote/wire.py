"""What travels between a reward server and its clients: strict JSON, and our own endpoint.

`POST /v1/score` takes whole groups::

    {"groups": [{"id": "g1", "prompt": [{"role": "user", "content": "2 + 2?"}],
                 "completions": [[{"role": "assistant", "content": "4"}], ...]}, ...],
     "request_id": "...",        optional; comes back
     "model_version": "..."}     optional; another version answers 409

and gives, in the same order and with the same ids::

    {"groups": [{"id": "g1", "scores": [{"value": 1.5, "values": [1.5], "num_tokens": 12,
                                         "truncated": false, "failure": null}, ...]}, ...],
     "model": "...", "model_version": "...", "request_id": "..."}

Where a score came about from several numbers it has them by name, too: `"parts": {"kind": 0.5}`.
A completion without a score has `"value": null` and a reason in `failure`, and the others are not
affected. Instead of messages a prompt may be a text, which the user says, and a completion a text,
which the assistant says; for what its client has rendered itself see `rendered`. An error is
`{"error": {"code": "...", "message": "..."}}`.

The formats of other programs are in `foreign_wire`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laurel.data.sources import json_kind
from laurel.errors import ProtocolError
from laurel.types import Completion, Conversation, Group, Message, Score

MOST_DEPTH = 16
"""Objects and lists in each other, in anything that is read."""

SCORE_PATH = "/v1/score"
VERSION_HEADER = "X-Model-Version"
"""Every answer of a reward server has it."""


# -------------------------------------------------------------------------------------------- JSON


def parse(body: bytes) -> Any:
    """A JSON text; without NaN, infinities, keys that come twice, and other bytes than UTF-8.

    Raises:
        ProtocolError: It is not that.
    """
    try:
        found = json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except ProtocolError:
        raise
    except RecursionError:
        raise ProtocolError(_TOO_DEEP) from None
    except ValueError as error:
        raise ProtocolError(f"not the JSON that is expected here: {error}") from error
    _check_depth(body)
    return found


_TOO_DEEP = f"the JSON is nested more than {MOST_DEPTH} deep"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_BEGINS_A_VALUE = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))


def has_more_values(body: bytes, most: int, most_nested: int) -> bool:
    """Whether a JSON text has more than `most` values, or more than `most_nested` that nest.

    Commas and opening brackets are counted, of which there is about one for each value. Only where
    they are too many is the text searched for those outside of strings. Other threads can run
    during that search, but not while the text is parsed.

    Args:
        body: The text.
        most: Limit of numbers, strings, lists and objects together.
        most_nested: Limit of lists and objects, each of which takes ten times as long to parse as a
            number.
    """
    nested = body.count(b"[") + body.count(b"{")
    if nested <= most_nested and nested + body.count(b",") <= most:
        return False
    found = nested = 0
    for piece in _BEGINS_A_VALUE.finditer(body):
        sign = piece[0]
        if len(sign) == 1:  # no text is so short
            found += 1
            nested += sign != b","
        if found > most or nested > most_nested:
            return True
    return False


def _check_depth(body: bytes) -> None:
    """Refuse a JSON text, known to be one, that is deep; level by level from the inside."""
    if body.count(b"[") + body.count(b"{") <= MOST_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKET)
    for _ in range(MOST_DEPTH):
        if not brackets:
            return
        brackets = re.sub(rb"\[\]|\{\}", b"", brackets)
    if brackets:
        raise ProtocolError(_TOO_DEEP)


def dump(value: Any) -> bytes:
    """The JSON text of a value.

    Raises:
        ValueError: A number in it is not finite.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _refuse_constant(name: str) -> None:
    raise ProtocolError(f"{name} is no JSON", kind="nan")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("an object has the same key twice")
    return found


def _expect_keys(value: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    unknown = sorted(value.keys() - set(allowed))
    if unknown:
        raise ProtocolError(f"{what} has {unknown[0]!r}; it may have: {', '.join(allowed)}")


# -------------------------------------------------------------------------------- conversations


def messages_json(conversation: Conversation) -> list[dict[str, str]]:
    """A conversation as a list of `{"role", "content"}`."""
    return [{"role": message.role, "content": message.content} for message in conversation]


def read_messages(value: Any, what: str) -> Conversation:
    """The conversation that a list of `{"role", "content"}` is.

    Raises:
        ProtocolError: It is none.
    """
    return _read_messages(value, what, must_be="a list of messages")


def read_said(value: Any, what: str, *, role: str) -> Conversation:
    """Messages, or a text that `role` says; see `read_messages`."""
    if isinstance(value, str):
        return (Message(role, value),)
    return _read_messages(value, what, must_be="a text or a list of messages")


def _read_messages(value: Any, what: str, *, must_be: str) -> Conversation:
    messages = []
    for item in expect_list(value, what, must_be=must_be):
        message = expect_object(item, f"a message of {what}")
        _expect_keys(message, ("role", "content"), f"a message of {what}")
        messages.append(
            Message(
                expect_text(message.get("role", MISSING), f"the role of a message of {what}"),
                expect_text(message.get("content", MISSING), f"the content of a message of {what}"),
            )
        )
    return tuple(messages)


def group_json(group: Group) -> dict[str, Any]:
    """A group as `/v1/score` takes it."""
    return {
        "id": group.id,
        "prompt": messages_json(group.prompt),
        "completions": [messages_json(one.messages) for one in group.completions_G],
    }


def read_group(value: Any, what: str) -> Group:
    """A group from JSON.

    Raises:
        ProtocolError: It is none.
    """
    group = expect_object(value, what)
    _expect_keys(group, ("id", "prompt", "completions"), what)
    completions_G = []
    completions = expect_list(
        group.get("completions", MISSING),
        f"'completions' of {what}",
        must_be="a list of completions",
    )
    for item in completions:
        messages = read_said(item, f"a completion of {what}", role="assistant")
        if not messages:
            raise ProtocolError(f"a completion of {what} has no message")
        completions_G.append(Completion(messages=messages))
    return Group(
        id=expect_text(group.get("id", MISSING), f"'id' of {what}"),
        prompt=read_said(group.get("prompt", MISSING), f"'prompt' of {what}", role="user"),
        completions_G=tuple(completions_G),
    )


# ------------------------------------------------------------------------------------- /v1/score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What `/v1/score` is asked."""

    groups: tuple[Group, ...]
    request_id: str = ""
    model_version: str = ""
    """The only version whose scores are wanted; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    """What it answers."""

    scores: tuple[tuple[Score, ...], ...]
    model: str
    model_version: str
    """The version that gave every one of the scores."""
    request_id: str = ""


def score_request(request: ScoreRequest) -> dict[str, Any]:
    """The JSON value of a request."""
    value: dict[str, Any] = {"groups": [group_json(group) for group in request.groups]}
    if request.request_id:
        value["request_id"] = request.request_id
    if request.model_version:
        value["model_version"] = request.model_version
    return value


def read_score_request(value: Any) -> ScoreRequest:
    """The request that a JSON value is.

    Raises:
        ProtocolError: It is none.
    """
    request = expect_object(value, "the request")
    _expect_keys(request, ("groups", "request_id", "model_version"), "the request")
    groups = expect_list(request.get("groups", MISSING), "'groups'", must_be="a list of groups")
    return ScoreRequest(
        groups=tuple(read_group(group, f"group {i}") for i, group in enumerate(groups)),
        request_id=expect_text(request.get("request_id", ""), "'request_id'"),
        model_version=expect_text(request.get("model_version", ""), "'model_version'"),
    )


def score_json(score: Score) -> dict[str, Any]:
    """One verdict as JSON."""
    found: dict[str, Any] = {
        "value": score.value,
        "values": list(score.values_K),
        "num_tokens": score.num_tokens,
        "truncated": score.truncated,
        "failure": score.failure,
    }
    if score.parts:
        found["parts"] = dict(score.parts)
    return found


def read_score(value: Any, what: str) -> Score:
    """One verdict from JSON.

    Raises:
        ProtocolError: It is none, or neither a number nor a failure, or both.
    """
    score = expect_object(value, what)
    failure = score.get("failure")
    num_tokens, truncated = score.get("num_tokens"), score.get("truncated")
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        raise ProtocolError(f"'num_tokens' of {what} is no count")
    if not isinstance(truncated, bool):
        raise ProtocolError(f"'truncated' of {what} is neither true nor false")
    parts = {  # older servers say nothing of them
        name: expect_number(number, f"the part {name!r} of {what}")
        for name, number in expect_object(score.get("parts", {}), f"'parts' of {what}").items()
    }
    more: dict[str, Any] = {"num_tokens": num_tokens, "truncated": truncated, "parts": parts}
    if failure is not None:
        if score.get("value") is not None:
            raise ProtocolError(f"{what} has both a value and a failure")
        reason = expect_text(failure, f"'failure' of {what}") or "no reason was given"
        return Score(value=None, failure=reason, **more)
    value = expect_number(score.get("value", MISSING), f"'value' of {what}")
    values = expect_list(score.get("values", MISSING), f"'values' of {what}")
    values_K = tuple(expect_number(one, f"one of 'values' of {what}") for one in values)
    return Score(value=value, values_K=values_K, **more)


def score_reply(groups: Sequence[Group], reply: ScoreReply) -> dict[str, Any]:
    """The JSON value of an answer.

    Args:
        groups: What was asked, in the order of the scores.
        reply: The answer.
    """
    value: dict[str, Any] = {
        "groups": [
            {"id": group.id, "scores": [score_json(score) for score in scores_G]}
            for group, scores_G in zip(groups, reply.scores, strict=True)
        ],
        "model": reply.model,
        "model_version": reply.model_version,
    }
    if reply.request_id:
        value["request_id"] = reply.request_id
    return value


def read_score_reply(value: Any, request: ScoreRequest) -> ScoreReply:
    """The answer to a request, whole or not at all.

    Raises:
        ProtocolError: Another count, order or id than asked, a number that is not finite, another
            version than asked.
    """
    reply = expect_object(value, "the reply")
    version = expect_text(reply.get("model_version", MISSING), "'model_version' of the reply")
    if request.model_version and version != request.model_version:
        raise ProtocolError(
            f"scores of version {version!r}; asked was {request.model_version!r}", kind="version"
        )
    request_id = expect_text(reply.get("request_id", ""), "'request_id' of the reply")
    if request_id != request.request_id:
        raise ProtocolError(f"the reply is to request {request_id!r}, not {request.request_id!r}")
    found = expect_list(reply.get("groups", MISSING), "'groups' of the reply")
    if len(found) != len(request.groups):
        raise ProtocolError(f"{len(found)} groups came back of {len(request.groups)}", kind="count")
    return ScoreReply(
        scores=tuple(
            _read_scored_group(one, group) for one, group in zip(found, request.groups, strict=True)
        ),
        model=expect_text(reply.get("model", MISSING), "'model' of the reply"),
        model_version=version,
        request_id=request_id,
    )


def _read_scored_group(value: Any, group: Group) -> tuple[Score, ...]:
    scored = expect_object(value, "a group of the reply")
    if scored.get("id") != group.id:
        raise ProtocolError(f"group {scored.get('id')!r} came back in the place of {group.id!r}")
    scores = expect_list(scored.get("scores", MISSING), f"'scores' of group {group.id!r}")
    if len(scores) != len(group.completions_G):
        raise ProtocolError(
            f"{len(scores)} scores came back for the {len(group.completions_G)} completions of "
            f"group {group.id!r}",
            kind="count",
        )
    return tuple(read_score(s, f"score {i} of group {group.id!r}") for i, s in enumerate(scores))


# ---------------------------------------------------------------------------------------- errors


def error_json(code: str, message: str) -> dict[str, Any]:
    """What every error of the server looks like."""
    return {"error": {"code": code, "message": message}}


def read_error(value: Any) -> str:
    """What an error says, of our server or another; empty where it says nothing readable."""
    if not isinstance(value, dict):
        return ""
    error = value.get("error", value.get("detail", value.get("message", "")))
    if isinstance(error, dict):
        error = error.get("message", "")
    return error if isinstance(error, str) else ""


# --------------------------------------------------------------------------------------------------
# The values of a JSON text that are expected to be of one type, or what they must be and are.

MISSING: Any = object()
"""What stands for an entry that is not there, so that a message can say that."""


def expect_object(value: Any, what: str) -> Mapping[str, Any]:
    """The value, if it is an object.

    Raises:
        ProtocolError: It is not; the message calls it `what`.
    """
    if not isinstance(value, dict):
        raise _other(value, what, "an object")
    return value


def expect_list(value: Any, what: str, *, must_be: str = "a list") -> Sequence[Any]:
    """The value, if it is a list; see `expect_object`. `must_be` says what else is taken, too."""
    if not isinstance(value, list):
        raise _other(value, what, must_be)
    return value


def expect_text(value: Any, what: str) -> str:
    """The value, if it is a text; see `expect_object`."""
    if not isinstance(value, str):
        raise _other(value, what, "a text")
    return value


def expect_number(value: Any, what: str) -> float:
    """The value, if it is a finite number; see `expect_object`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _other(value, what, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError(f"{what} is not finite", kind="nan")
    return number


def _other(value: Any, what: str, must_be: str) -> ProtocolError:
    if value is MISSING:
        return ProtocolError(f"{what} is missing; it must be {must_be}")
    return ProtocolError(f"{what} must be {must_be}, and is {json_kind(value)}")

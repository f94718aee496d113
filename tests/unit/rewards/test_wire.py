import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import ProtocolError
from laurel.rewards.remote.wire import (
    MOST_DEPTH,
    ScoreReply,
    ScoreRequest,
    dump,
    error_json,
    has_more_values,
    parse,
    read_error,
    read_score_reply,
    read_score_request,
    score_reply,
    score_request,
)
from laurel.types import Completion, Group, Message, Score, group_of

TEXT = st.text(max_size=20)
MESSAGES = st.lists(st.builds(Message, TEXT, TEXT), max_size=3).map(tuple)
SAID = st.lists(st.builds(Message, TEXT, TEXT), min_size=1, max_size=3).map(tuple)
GROUPS = st.builds(
    Group,
    id=TEXT,
    prompt=MESSAGES,
    completions_G=st.lists(st.builds(Completion, messages=SAID), max_size=4).map(tuple),
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SCORES = st.one_of(
    st.builds(
        Score,
        value=NUMBERS,
        values_K=st.lists(NUMBERS, max_size=3).map(tuple),
        num_tokens=st.integers(0, 9999),
        truncated=st.booleans(),
        parts=st.dictionaries(TEXT, NUMBERS, max_size=2),
    ),
    st.builds(
        Score,
        value=st.none(),
        failure=st.text(min_size=1, max_size=9),
        num_tokens=st.integers(0, 9999),
    ),
)


@given(groups=st.lists(GROUPS, max_size=3).map(tuple), request_id=TEXT, version=TEXT)
def test_a_request_comes_back_as_it_was(groups, request_id, version):
    request = ScoreRequest(groups=groups, request_id=request_id, model_version=version)
    assert read_score_request(parse(dump(score_request(request)))) == request


@given(data=st.data(), groups=st.lists(GROUPS, max_size=3))
def test_a_reply_comes_back_as_it_was(data, groups):
    scores = tuple(tuple(data.draw(SCORES) for _ in group.completions_G) for group in groups)
    reply = ScoreReply(scores=scores, model="m", model_version="1", request_id="r")
    request = ScoreRequest(groups=tuple(groups), request_id="r", model_version="1")
    assert read_score_reply(parse(dump(score_reply(groups, reply))), request) == reply


def test_texts_stand_for_messages():
    value = {"groups": [{"id": "g", "prompt": "2 + 2?", "completions": ["4", "5"]}]}
    group = group_of((Message("user", "2 + 2?"),), ("4", "5"), group_id="g")
    assert read_score_request(value).groups == (group,)


GROUP = {"id": "g", "prompt": "p", "completions": ["a"]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the request must be an object, and is a list"),
        ({}, "'groups' is missing; it must be a list of groups"),
        ({"groups": None}, "'groups' must be a list of groups, and is null"),
        ({"groups": {}}, "'groups' must be a list of groups, and is an object"),
        ({"groups": [], "group": 1}, "the request has 'group'; it may have: groups, request_id"),
        ({"groups": [], "request_id": 3}, "'request_id' must be a text, and is a number"),
        ({"groups": [1]}, "group 0 must be an object, and is a number"),
        ({"groups": [{**GROUP, "id": None}]}, "'id' of group 0 must be a text, and is null"),
        ({"groups": [{"prompt": "p", "completions": []}]}, "'id' of group 0 is missing"),
        ({"groups": [{"id": "g", "completions": []}]}, "'prompt' of group 0 is missing"),
        ({"groups": [{"id": "g", "prompt": "p"}]}, "'completions' of group 0 is missing"),
        ({"groups": [{**GROUP, "completion": "a"}]}, "group 0 has 'completion'"),
        (
            {"groups": [{**GROUP, "completions": "a"}]},
            "'completions' of group 0 must be a list of completions, and is a string",
        ),
        (
            {"groups": [{**GROUP, "completions": [3]}]},
            "a completion of group 0 must be a text or a list of messages, and is a number",
        ),
        (
            {"groups": [{**GROUP, "prompt": 5}]},
            "'prompt' of group 0 must be a text or a list of messages, and is a number",
        ),
        (
            {"groups": [{**GROUP, "prompt": {"role": "user", "content": "p"}}]},
            "'prompt' of group 0 must be a text or a list of messages, and is an object",
        ),
        ({"groups": [{**GROUP, "completions": [[]]}]}, "a completion of group 0 has no message"),
        (
            {"groups": [GROUP, {**GROUP, "prompt": [{"role": "user"}]}]},
            "the content of a message of 'prompt' of group 1 is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_said(value, said):
    with pytest.raises(ProtocolError) as caught:
        read_score_request(value)
    assert said.split(";")[0] in str(caught.value)


def nested(depth, opening="[", closing="]"):
    return (opening * depth + closing * depth).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b"\xff\xfe",
        b"",
        b"[1,",
        b'"\xed\xa0\x80"',
        b"1" * 100_000,
        nested(MOST_DEPTH + 1),
        nested(200_000),
        nested(100, '{"a":[', "]}"),
        b"[[],[]," * 10 + b"1" + b"]" * 10 + b" " * 9 + b"x",
        b"[" + b'"[",' * 30 + nested(MOST_DEPTH) + b"]",
    ],
)
def test_what_is_not_strict_json_is_refused(body):
    with pytest.raises(ProtocolError):
        parse(body)


@pytest.mark.parametrize(
    "value",
    [
        ["[" * 100 + "{" * 50],
        ['\\"[[[[[[[[[[[[[[[[[[['],
        [[["]"] * 30] * 30],
        json.loads(nested(MOST_DEPTH)),
        {"a\\": {"b[": ["}"] * 99}},
        "é\u2028\x00",
        1e308,
    ],
)
def test_what_is_allowed_is_read(value):
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


def test_what_is_not_finite_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        dump(math.nan)


def reply_value(**changes):
    score = {"value": 1.0, "values": [1.0], "num_tokens": 3, "truncated": False, "failure": None}
    return {
        "groups": [{"id": "g", "scores": [{**score, **changes.pop("score", {})}]}],
        "model": "m",
        "model_version": "1",
        "request_id": "r",
        **changes,
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (reply_value(model_version="2"), "version '2'"),
        (reply_value(request_id="s"), "request 's'"),
        (reply_value(groups=[]), "0 groups came back of 1"),
        (reply_value(groups=[{"id": "h", "scores": []}]), "'h' came back in the place of 'g'"),
        (reply_value(groups=[{"id": "g", "scores": []}]), "0 scores came back"),
        (reply_value(score={"value": None}), "must be a number"),
        (reply_value(score={"value": True}), "must be a number"),
        (reply_value(score={"value": "1"}), "must be a number"),
        (reply_value(score={"value": 10**400}), "is not finite"),
        (reply_value(score={"failure": "why"}), "both a value and a failure"),
        (reply_value(score={"num_tokens": -1}), "is no count"),
        (reply_value(score={"truncated": 0}), "neither true nor false"),
        (reply_value(score={"values": [None]}), "must be a number"),
        (
            reply_value(score={"parts": [1.0]}),
            "'parts' of score 0 of group 'g' must be an object, and is a list",
        ),
        (
            reply_value(score={"parts": {"kind": "1"}}),
            "the part 'kind' of score 0 .* must be a number, and is a string",
        ),
        (reply_value(score={"parts": {"kind": 10**400}}), "is not finite"),
        ({"groups": []}, "'model_version' of the reply is missing"),
    ],
)
def test_a_reply_is_whole_or_refused(value, said):
    group = group_of((Message("user", "p"),), ("a",), group_id="g")
    request = ScoreRequest(groups=(group,), request_id="r", model_version="1")
    (right,) = read_score_reply(reply_value(), request).scores[0]
    assert (right.value, right.parts) == (1.0, {}), "as a server says it that knows of no parts"
    with pytest.raises(ProtocolError, match=said):
        read_score_reply(value, request)


def test_errors_of_any_server_are_read():
    assert read_error(error_json("code", "why")) == "why"
    assert read_error({"detail": "why"}) == "why"
    assert read_error({"message": "why", "object": "error"}) == "why"
    for odd in ([], None, {"error": 3}, {"error": {}}, {"detail": [{"loc": 1}]}):
        assert isinstance(read_error(odd), str)


@pytest.mark.parametrize(
    ("body", "values", "nested"),
    [
        (b"[1, 2, 3]", 3, 1),
        (b'["a, b, [c", "{{{{[[[[", 3]', 3, 1),
        (b'["a\\\\", "\\",\\",", ",,,,,,,,"]', 3, 1),
        (b'[[], {}, [[]], "[,{"]', 8, 5),
        (b'{"a": [1, 2], "b,,,,,,": {}}', 5, 3),
    ],
)
def test_values_of_a_json_text_are_counted_and_what_texts_say_is_not(body, values, nested):
    json.loads(body)
    assert not has_more_values(body, values, nested)
    assert has_more_values(body, values - 1, nested)
    assert has_more_values(body, values, nested - 1)

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import ProtocolError
from laurel.rewards.remote.wire import (
    MAX_DEPTH,
    ScoreReply,
    ScoreRequest,
    dump,
    parse,
    read_error,
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


@given(groups=st.lists(GROUPS, max_size=3), request_id=TEXT, version=TEXT)
def test_a_request_comes_back_as_it_was(groups, request_id, version):
    request = ScoreRequest.of(groups, request_id=request_id, version=version)
    found = ScoreRequest.read(parse(dump(request.model_dump(exclude_unset=True))))
    assert (found.as_groups, found.request_id, found.model_version) == (groups, request_id, version)


@given(data=st.data(), groups=st.lists(GROUPS, max_size=3))
def test_a_reply_comes_back_as_it_was(data, groups):
    scores = [tuple(data.draw(SCORES) for _ in group.completions_G) for group in groups]
    reply = ScoreReply.of(groups, scores, model="m", model_version="1", request_id="r")
    request = ScoreRequest.of(groups, request_id="r", version="1")
    found = ScoreReply.read(parse(dump(reply.model_dump())))
    assert (found.scores_of(request), found.model) == (scores, "m")


def test_texts_stand_for_messages():
    value = {"groups": [{"id": "g", "prompt": "2 + 2?", "completions": ["4", "5"]}]}
    group = group_of((Message("user", "2 + 2?"),), ("4", "5"), group_id="g")
    assert ScoreRequest.read(value).as_groups == [group]


GROUP = {"id": "g", "prompt": "p", "completions": ["a"]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the request should be an object, and is a list"),
        ({}, "'groups' of the request is missing"),
        ({"groups": None}, "'groups' of the request should be a valid list, and is null"),
        (
            {"group": []},
            "the request has an unknown key 'group'; did you mean 'groups'? Its keys are: groups,",
        ),
        ({"groups": [], "request_id": 3}, "'request_id' of the request should be a valid string"),
        ({"groups": [1]}, "'groups[0]' of the request should be an object, and is a number"),
        ({"groups": [{**GROUP, "id": None}]}, "'groups[0].id' of the request should be a valid"),
        ({"groups": [{"id": "g", "prompt": "p"}]}, "'groups[0].completions' of the request is mis"),
        (
            {"groups": [GROUP, {"id": "g", "promt": "p", "completions": []}]},
            "'groups[1]' of the request has an unknown key 'promt'; did you mean 'prompt'? Its",
        ),
        (
            {"groups": [{**GROUP, "prompt": [{"role": "user", "content": "", "name": "a"}]}]},
            "prompt[0]' of the request has an unknown key 'name'; its keys are: role, content",
        ),
        (
            {"groups": [{**GROUP, "completions": [3]}]},
            "'groups[0].completions[0]' of the request should be a valid string or a valid list, "
            "and is a number",
        ),
        ({"groups": [{**GROUP, "completions": [[]]}]}, "at least 1 item"),
        (
            {"groups": [GROUP, {**GROUP, "prompt": [{"role": "user"}]}]},
            "'groups[1].prompt[0].content' of the request is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_said(value, said):
    with pytest.raises(ProtocolError) as caught:
        ScoreRequest.read(value)
    assert said in str(caught.value)


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
        nested(MAX_DEPTH + 1),
        nested(200_000),
        nested(100, '{"a":[', "]}"),
        b"[[],[]," * 10 + b"1" + b"]" * 10 + b" " * 9 + b"x",
        b"[" + b'"[",' * 30 + nested(MAX_DEPTH) + b"]",
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
        json.loads(nested(MAX_DEPTH)),
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
        (reply_value(score={"value": None}), "neither a value nor a failure"),
        (reply_value(score={"value": True}), "should be a valid number"),
        (reply_value(score={"value": "1"}), "should be a valid number"),
        (reply_value(score={"value": 10**400}), "is not finite"),
        (reply_value(score={"failure": "why"}), "both a value and a failure"),
        (reply_value(score={"num_tokens": -1}), "greater than or equal to 0"),
        (reply_value(score={"truncated": 0}), "should be a valid boolean"),
        (reply_value(score={"values": [None]}), "should be a valid number"),
        (
            reply_value(score={"parts": [1.0]}),
            r"'groups\[0\].scores\[0\].parts' of the reply should be a valid dictionary",
        ),
        (
            reply_value(score={"parts": {"kind": "1"}}),
            r"scores\[0\].parts.kind' of the reply should be a valid number, and is a string",
        ),
        (reply_value(score={"parts": {"kind": 10**400}}), "is not finite"),
        ({"groups": [], "model": "m"}, "'model_version' of the reply is missing"),
    ],
)
def test_a_reply_is_whole_or_refused(value, said):
    group = group_of((Message("user", "p"),), ("a",), group_id="g")
    request = ScoreRequest.of([group], request_id="r", version="1")
    ((right,),) = ScoreReply.read(reply_value(), "the reply").scores_of(request)
    assert (right.value, right.parts) == (1.0, {}), "as a server says it that knows of no parts"
    with pytest.raises(ProtocolError, match=said):
        ScoreReply.read(value, "the reply").scores_of(request)


def test_errors_of_any_server_are_read():
    assert read_error({"error": {"code": "code", "message": "why"}}) == "why"
    assert read_error({"detail": "why"}) == "why"
    assert read_error({"message": "why", "object": "error"}) == "why"
    for odd in ([], None, {"error": 3}, {"error": {}}, {"detail": [{"loc": 1}]}):
        assert isinstance(read_error(odd), str)

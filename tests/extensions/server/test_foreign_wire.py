"""The server's side: what clients of other projects send, and what they read of the answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import ProtocolError
from laurel.extensions.server import foreign, other_dialects
from laurel.extensions.server.foreign import (
    ClassifyRequest,
    EmbeddingsRequest,
    GetRewardRequest,
    RemoteRmRequest,
    sigmoid,
)
from laurel.rewards.preparing import rendered_rows
from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.wire import validated
from laurel.types import Message, SentTurn, group_of

CONVERSATION = (Message("user", "2 + 2?"), Message("assistant", "4"))
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SCORES = [1.5, -0.25]


def rows_of(request):
    (group,) = request.as_groups
    return rendered_rows(group) or []


def scored(*values):
    return foreign.ScoredRows(
        scores=values, num_tokens=[3] * len(values), model="m", request_id="r", created=1
    )


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([1.0, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([[1], "a"], [(1,), "a"]),
        ([], []),
        ([[]], [()]),
    ],
)
def test_input_is_a_text_or_ids_or_a_list_of_either(value, rows):
    for request in (
        ClassifyRequest.read({"input": value}),
        EmbeddingsRequest.read({"input": value, "model": "m"}),
    ):
        assert rows_of(request) == rows


@pytest.mark.parametrize("value", [None, 1, {}, [1, "a"], [1, -1], [[1.5]], [True], [[2**31]]])
def test_other_input_is_refused(value):
    for kind in (ClassifyRequest, EmbeddingsRequest):
        with pytest.raises(ProtocolError):
            kind.read({"input": value})


@pytest.mark.parametrize("key", ["use_activation", "activation", "softmax"])
def test_scores_are_squashed_unless_a_key_of_any_version_says_no(key):
    squashed = [sigmoid(1.5)]
    assert ClassifyRequest.read({"input": "a"}).activated([1.5]) == squashed
    assert ClassifyRequest.read({"input": "a", key: True}).activated([1.5]) == squashed
    assert ClassifyRequest.read({"input": "a", key: False}).activated([1.5]) == [1.5]
    with pytest.raises(ProtocolError):
        ClassifyRequest.read({"input": "a", key: "no"})


def test_messages_are_one_conversation():
    request = ClassifyRequest.read({"messages": MESSAGES, "use_activation": False})
    (group,) = request.as_groups
    assert group.conversation(0) == CONVERSATION
    for odd in ({"messages": []}, {"messages": "a"}, {}, [], {"messages": [{"role": "user"}]}):
        with pytest.raises(ProtocolError):
            ClassifyRequest.read(odd)


def test_a_request_has_the_key_of_one_form_only():
    """The server would have to guess which, and another server might guess otherwise."""
    with pytest.raises(ProtocolError, match="has input and messages: send one of"):
        ClassifyRequest.read({"input": "a", "messages": MESSAGES})
    with pytest.raises(ProtocolError, match="has text and input_ids: send one of"):
        ClassifyRequest.read({"text": "a", "input_ids": [1]})
    with pytest.raises(ProtocolError, match="has none of these: send one of input, messages"):
        ClassifyRequest.read({})


def test_what_servers_answer_is_what_clients_read():
    raw = {"use_activation": False}
    native = ClassifyRequest.read({"text": ["a", "b"]}).reply(scored(*SCORES))
    for asked, read in (
        (ClassifyRequest.read({"input": ["a", "b"], **raw}), foreign.ClassifyScores),
        (EmbeddingsRequest.read({"input": ["a", "b"]}), foreign.EmbeddingsScores),
        (GetRewardRequest.read({"query": ["a", "b"]}), foreign.GetRewardScores),
    ):
        reply = read.read(asked.reply(scored(*SCORES)).model_dump())
        assert reply.in_order(2) == SCORES
        with pytest.raises(ProtocolError, match="came back"):
            reply.in_order(3)
    assert other_dialects._read_native([one.model_dump() for one in native], 2) == SCORES
    assert foreign.read_remote_rm_reply(1.5) == 1.5
    assert foreign.read_remote_rm_reply({"score": 1.5}, key="score") == 1.5


def test_slime():
    asked = group_of(CONVERSATION[:1], ("4",), group_id="g")
    sent = dialect_of("slime").ask([asked], request_id="", version="").value
    assert rows_of(RemoteRmRequest.read(sent)) == [SentTurn(CONVERSATION[:1], "4", None)]
    as_text = {"prompt": "2 + 2?", "response": "4", "label": None}
    for told in (None, True, False):  # the model's contract tells what was not said
        request = validated(RemoteRmRequest.model_validate, as_text, rendered=told)
        assert rows_of(request) == [SentTurn("2 + 2?", "4", told)]
    with pytest.raises(ProtocolError, match="'r' of the reply is missing"):
        foreign.read_remote_rm_reply({}, key="r")
    for odd in ({"prompt": "a"}, {"response": "a"}, {"prompt": 1, "response": "a"}, "a"):
        with pytest.raises(ProtocolError):
            RemoteRmRequest.read(odd)
    with pytest.raises(ProtocolError, match="is missing; did you mean 'prompt' by 'promt'"):
        RemoteRmRequest.read({"promt": "a", "response": "a"})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_sigmoid_of_anything(score):
    value = sigmoid(score)
    assert 0.0 <= value <= 1.0
    assert value + sigmoid(-score) == pytest.approx(1.0)
    assert not math.isnan(value)

"""The server's side: what clients of other projects send, and what they read of the answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import ProtocolError
from laurel.rewards.remote import foreign as wire
from laurel.types import Message, SentTurn

CONVERSATION = (Message("user", "2 + 2?"), Message("assistant", "4"))
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SCORES = [1.5, -0.25]


@pytest.mark.parametrize(
    ("value", "rows", "is_list"),
    [
        ("a", ("a",), False),
        (["a", "b"], ("a", "b"), True),
        ([1, 2], ((1, 2),), False),
        ([[1, 2], [3]], ((1, 2), (3,)), True),
        ([[1], "a"], ((1,), "a"), True),
        ([], (), True),
        ([[]], ((),), True),
    ],
)
def test_input_is_a_text_or_ids_or_a_list_of_either(value, rows, is_list):
    for request in (
        wire.read_classify_request({"input": value}),
        wire.read_embeddings_request({"input": value, "model": "m"}),
    ):
        assert (request.rows, request.is_list) == (rows, is_list)


@pytest.mark.parametrize("value", [None, 1, {}, [1, "a"], [1, -1], [[1.5]], [True], [[2**31]]])
def test_other_input_is_refused(value):
    for read in (wire.read_classify_request, wire.read_embeddings_request):
        with pytest.raises(ProtocolError):
            read({"input": value})


@pytest.mark.parametrize("key", ["use_activation", "activation", "softmax"])
def test_scores_are_squashed_unless_a_key_of_any_version_says_no(key):
    assert wire.read_classify_request({"input": "a"}).squashed
    assert wire.read_classify_request({"input": "a", key: True}).squashed
    assert not wire.read_classify_request({"input": "a", key: False}).squashed
    with pytest.raises(ProtocolError):
        wire.read_classify_request({"input": "a", key: "no"})
    assert not wire.read_classify_request(wire.classify_request(["a"], model="m")).squashed


def test_messages_are_one_conversation():
    request = wire.read_classify_request({"messages": MESSAGES, "use_activation": False})
    (group,) = request.groups
    assert group.conversation(0) == CONVERSATION
    for odd in ({"messages": []}, {"messages": "a"}, {}, [], {"messages": [{"role": "user"}]}):
        with pytest.raises(ProtocolError):
            wire.read_classify_request(odd)


def test_a_request_has_the_key_of_one_form_only():
    """The server would have to guess which, and another server might guess otherwise."""
    with pytest.raises(ProtocolError, match="has input and messages: send one of them"):
        wire.read_classify_request({"input": "a", "messages": None})
    with pytest.raises(ProtocolError, match="has text and input_ids: send one of them"):
        wire.read_classify_request({"text": "a", "input_ids": [1]})


def test_the_native_form_is_never_squashed():
    for value in ({"text": "a"}, {"input_ids": [1, 2]}, {"text": ["a", "b"]}):
        assert wire.is_native(value)
        assert not wire.read_classify_request(value).squashed
    assert not wire.is_native({"input": "a"})
    assert wire.native_classify_reply([1.5], [3], is_list=False) == {
        "embedding": [1.5],
        "meta_info": {"prompt_tokens": 3},
    }


def test_what_servers_answer_is_what_clients_read():
    replies = [
        (
            wire.classify_reply(SCORES, request_id="r", created=1, model="m", num_tokens=9),
            wire.read_classify_reply,
        ),
        (wire.native_classify_reply(SCORES, [3, 4], is_list=True), wire.read_native_classify_reply),
        (wire.embeddings_reply(SCORES, model="m", num_tokens=9), wire.read_embeddings_reply),
        (wire.get_reward_reply(SCORES), wire.read_get_reward_reply),
    ]
    for reply, read in replies:
        assert read(reply, count=2) == SCORES
        with pytest.raises(ProtocolError, match="came back"):
            read(reply, count=3)
    assert wire.read_remote_rm_reply(1.5) == 1.5
    assert wire.read_remote_rm_reply({"score": 1.5}, key="score") == 1.5


def test_openrlhf():
    sent = wire.get_reward_request(["a", "b"])
    assert wire.read_get_reward_request(sent).rows == ("a", "b")
    for odd in ({}, {"query": "a"}, {"query": [1]}, []):
        with pytest.raises(ProtocolError):
            wire.read_get_reward_request(odd)


def test_slime():
    sent = wire.remote_rm_request(CONVERSATION[:1], "4", label="4")
    request = wire.read_remote_rm_request(sent)
    (group,) = request.groups
    assert group.conversation(0) == CONVERSATION
    as_text = {"prompt": "2 + 2?", "response": "4", "label": None}
    for told in (None, True, False):  # the model's contract tells what was not said
        request = wire.read_remote_rm_request(as_text, rendered=told)
        assert request.rows == (SentTurn("2 + 2?", "4", told),)
    for odd in ({"prompt": "a"}, {"response": "a"}, {"prompt": 1, "response": "a"}, "a"):
        with pytest.raises(ProtocolError):
            wire.read_remote_rm_request(odd)


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        (wire.read_embeddings_request, {}, "'input' is missing"),
        (wire.read_get_reward_request, {"prompts": []}, "'query' is missing"),
        (
            wire.read_get_reward_request,
            {"query": "abc"},
            "'query' must be a list of texts, and is a string",
        ),
        (
            wire.read_embeddings_request,
            {"input": 3},
            "'input' must be a text, a list of token ids, or a list of either, and is a number",
        ),
        (
            wire.read_remote_rm_request,
            {"prompt": 5, "response": "a"},
            "'prompt' must be a text or a list of messages, and is a number",
        ),
        (wire.read_remote_rm_request, {"prompt": "a"}, "'response' is missing"),
        (wire.read_remote_rm_request, {"response": "a"}, "'prompt' is missing"),
        (lambda value: wire.read_classify_reply(value, count=1), {}, "'data' is missing"),
        (lambda value: wire.read_get_reward_reply(value, count=1), {}, "'rewards' is missing"),
        (lambda value: wire.read_remote_rm_reply(value, key="r"), {}, "'r' of the reply is missi"),
    ],
)
def test_what_is_missing_is_called_missing(read, value, said):
    with pytest.raises(ProtocolError, match=said):
        read(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_sigmoid_of_anything(score):
    value = wire.sigmoid(score)
    assert 0.0 <= value <= 1.0
    assert value + wire.sigmoid(-score) == pytest.approx(1.0)
    assert not math.isnan(value)

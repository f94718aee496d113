"""Tokens as rewardbench 0.1.4 makes them, written out by hand for a tokenizer of single bytes."""

import copy

import pytest

from laurel.errors import DataError, ModelError
from laurel.extensions.evaluation.rewardbench_tokens import (
    FORMATS,
    ReferenceFormat,
    RewardBenchContract,
    by_position,
)
from laurel.models.scoring import ScoringContract
from laurel.types import Completion, Group, Message, group_of
from tiny_tokenizers import make_tokenizer

PAD, BOS, EOS = 0, 1, 2
TURNS = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{% endfor %}"
    "{{ eos_token }}"
)
"""The initial of a role, and what it says."""
WITH_BOS = "{{ bos_token }}" + TURNS


def ids(text):
    """Of visible ASCII: the three special tokens come first, then `!`."""
    return [3 + ord(character) - ord("!") for character in text]


def contract_of(tokenizer, *, side="left", max_length=2048, pad_id=PAD, attributes=()):
    own = ScoringContract.create(
        copy.deepcopy(tokenizer),
        max_length=2048,
        truncation_side="left",
        append_eos=False,
        attributes=attributes,
    )
    form = ReferenceFormat(program="it", truncation_side=side, max_length=max_length)
    return RewardBenchContract(own, tokenizer, pad_id=pad_id, form=form)


QUESTION = group_of((Message("user", "q"),), ("yes",), group_id="g")


@pytest.mark.parametrize(
    ("template", "adds_bos", "expected", "start"),
    [
        (WITH_BOS, True, [BOS, BOS, *ids("uqayes"), EOS], 1),
        (WITH_BOS, False, [BOS, *ids("uqayes"), EOS], 0),
        (TURNS, True, [BOS, *ids("uqayes"), EOS], 0),
        (TURNS, False, [*ids("uqayes"), EOS], 0),
    ],
)
def test_bos_is_added_again_and_the_first_hidden(template, adds_bos, expected, start):
    contract = contract_of(make_tokenizer(template=template, adds_bos=adds_bos))
    (row,) = contract.rows(QUESTION)
    assert (row.ids, row.start, row.end) == (expected, start, len(expected))
    assert not row.truncated
    (tokens,) = contract.encode([QUESTION])
    assert tokens.branches_ids_G[0].tolist() == expected[start:]


@pytest.mark.parametrize(
    ("side", "adds_bos", "expected", "start"),
    [
        # The text loses its left end with its own BOS; the tokenizer's is put before what is left.
        ("left", True, [BOS, *ids("yes"), EOS], 0),
        ("left", False, [*ids("ayes"), EOS], 0),
        ("right", True, [BOS, BOS, *ids("uqa")], 1),
        ("right", False, [BOS, *ids("uqay")], 0),
    ],
)
def test_what_is_cut(side, adds_bos, expected, start):
    tokenizer = make_tokenizer(template=WITH_BOS, adds_bos=adds_bos)
    contract = contract_of(tokenizer, side=side, max_length=5)
    (row,) = contract.rows(QUESTION)
    assert (row.ids, row.start, row.truncated) == (expected, start, True)
    (tokens,) = contract.encode([QUESTION])
    assert tokens.truncated_G == (True,)
    assert tokens.branches_ids_G[0].tolist() == expected[start:]


def test_the_side_of_the_second_benchmark_is_the_tokenizers():
    assert FORMATS["reward-bench"].truncation_side == "left"
    form = FORMATS["reward-bench-2"]
    for side in ("left", "right"):
        tokenizer = make_tokenizer(template=WITH_BOS)
        tokenizer.truncation_side = side
        contract = contract_of(tokenizer, side=form.truncation_side, max_length=4)
        assert contract.form.truncation_side == side
        (row,) = contract.rows(QUESTION)
        assert row.ids == ([*ids("yes"), EOS] if side == "left" else [BOS, *ids("uqa")])


def test_the_score_is_read_before_what_looks_like_padding():
    tokenizer = make_tokenizer(template=TURNS, pad=None)  # nothing pads, so the end does
    tokenizer.chat_template = TURNS + "{{ eos_token }}"
    own = ScoringContract.create(
        copy.deepcopy(tokenizer), max_length=9, truncation_side="left", append_eos=False
    )
    form = FORMATS["reward-bench"]
    (row,) = RewardBenchContract(own, tokenizer, pad_id=None, form=form).rows(QUESTION)
    bos, eos = 0, 1
    assert row.ids[-2:] == [eos, eos]
    assert row.read_ids == [one - 1 for one in ids("uqayes")]
    assert bos not in row.ids
    # With a padding token of the model's own, it is not the end that is passed over.
    (row,) = contract_of(make_tokenizer(template=TURNS)).rows(QUESTION)
    assert row.read_ids[-1] == EOS


def test_roles_are_given_by_position():
    prompt = (Message("system", "s"), Message("user", "t"), Message("user", "v"))
    group = group_of(prompt, ("w",), group_id="g")
    contract = contract_of(make_tokenizer(template=TURNS))
    (row,) = contract.rows(group)
    assert row.ids == [*ids("usatuvaw"), EOS]
    (own,) = contract.own.encode([group])
    assert own.branches_ids_G[0].tolist() == [*ids("ssutuvaw"), EOS]


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        ((Message("system", "s"), Message("user", "q")), ("a",), "a prompt of 2 messages, at"),
        ((), ("a",), "a prompt of 0 messages"),
        ((Message("user", "q"),), ("a", "b"), "an answer of 2 messages"),
    ],
)
def test_conversations_that_the_reference_stops_at(prompt, answer, message):
    turns = tuple(Message("assistant", one) for one in answer)
    with pytest.raises(DataError, match=message):
        by_position(prompt, turns)
    group = Group(id="rows.jsonl:3", prompt=prompt, completions_G=(Completion(messages=turns),))
    with pytest.raises(DataError, match=rf"rows.jsonl:3: {message}"):
        contract_of(make_tokenizer(template=TURNS)).encode([group])


def test_nothing_but_padding_has_no_score():
    template = "{% for message in messages %}{{ pad_token }}{% endfor %}"
    own = make_tokenizer(template=TURNS)
    contract = contract_of(own)
    own.chat_template = template
    with pytest.raises(DataError, match="nothing but padding tokens"):
        contract.rows(QUESTION)


def test_models_that_the_reference_has_no_score_for():
    with pytest.raises(ModelError, match="its tokenizer pads with 0"):
        contract_of(make_tokenizer(template=TURNS), pad_id=7)
    left = make_tokenizer(template=TURNS)
    left.padding_side = "left"
    assert contract_of(left, pad_id=7).ignored_id == 7
    with pytest.raises(ModelError, match="the model has 2 outputs"):
        contract_of(make_tokenizer(template=TURNS), attributes=("helpful", "brief"))
    bare = make_tokenizer(template=TURNS)
    own = ScoringContract.create(
        copy.deepcopy(bare), max_length=9, truncation_side="left", append_eos=False
    )
    bare.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        RewardBenchContract(own, bare, pad_id=PAD, form=FORMATS["reward-bench"])


def test_an_answer_that_begins_as_another_shares_its_beginning():
    group = group_of((Message("user", "q"),), ("yes", "yet"), group_id="g")
    (tokens,) = contract_of(make_tokenizer(template=WITH_BOS, adds_bos=True)).encode([group])
    assert tokens.trunk_ids.tolist() == [BOS, *ids("uqaye")]
    assert [one.tolist() for one in tokens.branches_ids_G] == [[*ids("s"), EOS], [*ids("t"), EOS]]

"""How a conversation becomes tokens, what is saved of it, and what is refused at load."""

import re
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import tiny_tokenizers as made
from laurel.errors import CheckpointError, ConfigError, DataError, ModelError
from laurel.models.scoring import (
    FILE_NAME,
    GoldenScore,
    ScoringContract,
    ScoringRules,
    check_rendering,
)
from laurel.models.tokenizer import CHATML, render, shared_prefix
from laurel.types import Completion, Group, Message, SentTurn, group_of

QUESTION = (Message("user", "Where is the laurel?"),)
TOKENIZERS = {"llama 3.1": made.llama_31, "gemma": made.gemma, "qwen": made.chatml}


def contract_of(tokenizer=None, **changes):
    options = {"max_length": 4096, "truncation_side": "left", "append_eos": True}
    tokenizer = made.chatml() if tokenizer is None else tokenizer
    return ScoringContract.create(tokenizer, **{**options, **changes})


def whole(tokens):
    """The whole sequences of a token group."""
    return [[*tokens.trunk_ids.tolist(), *ids.tolist()] for ids in tokens.branches_ids_G]


def as_dicts(conversation):
    return [{"role": m.role, "content": m.content} for m in conversation]


TALKS = [
    [Message("user", "Hé, wie geht's?"), Message("assistant", "Gut — und dir?")],
    [
        Message("user", "1 + 1\n"),
        Message("assistant", "  2 "),
        Message("user", "sure?"),
        Message("assistant", "日本語 yes\n\n"),
    ],
]


@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_tokens_are_those_of_the_saved_tokenizer_on_raw_messages(name, append_eos, tmp_path):
    """D5: what reaches the model is `apply_chat_template(messages)`, token for token."""
    contract = contract_of(TOKENIZERS[name](), append_eos=append_eos)
    contract.tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    for talk in TALKS:
        group = Group(
            id="g", prompt=tuple(talk[:-1]), completions_G=(Completion(messages=(talk[-1],)),)
        )
        (tokens,) = contract.encode([group])
        expected = saved.apply_chat_template(as_dicts(talk), tokenize=True, return_dict=False)
        assert whole(tokens) == [expected]
        text = saved.apply_chat_template(as_dicts(talk), tokenize=False)
        assert contract.render(tuple(talk)) == text
        assert expected == saved(text, add_special_tokens=False)["input_ids"]
        for special in (saved.bos_token_id, saved.eos_token_id):
            assert special is None or expected.count(special) == text.count(
                saved.convert_ids_to_tokens(special)
            )


def sent(contract, prompt, response, is_rendered=None):
    return whole(contract.encode_rendered(SentTurn(prompt, response, is_rendered)))


def rendered_prompt(contract, conversation):
    return render(contract.tokenizer, conversation, contract.rules.template_kwargs, prompt=True)


@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("talk", [QUESTION, (*TALKS[1][:2], *QUESTION)], ids=["one", "two turns"])
def test_a_rendered_prompt_is_told_and_scored_as_its_messages(name, append_eos, talk):
    contract = contract_of(TOKENIZERS[name](), append_eos=append_eos)
    answer = "By the western gate."
    (tokens,) = contract.encode([group_of(talk, (answer,), group_id="")])
    prompt = rendered_prompt(contract, talk)
    after = contract.render((*talk, Message("assistant", answer))).rpartition(answer)[2]
    ends = (after, after.rstrip(), "")  # the trainer keeps some of the end of the turn, or none
    for end in (*ends, *(after[: one.end()] for one in re.finditer(">", after))):
        assert sent(contract, prompt, answer + end) == whole(tokens)
    assert sent(contract, prompt, answer, True) == whole(tokens)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_what_a_user_says_is_no_rendered_prompt(name):
    contract = contract_of(TOKENIZERS[name]())
    for text in (QUESTION[0].content, "a\n", "", "if a <b> c: [x] | y", "user\nassistant\n"):
        (tokens,) = contract.encode(
            [group_of((Message("user", text),), ("By the gate.",), group_id="")]
        )
        assert sent(contract, text, "By the gate.") == whole(tokens)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_what_cannot_be_told_is_refused_unless_it_is_said(name):
    contract = contract_of(TOKENIZERS[name]())
    special = contract.tokenizer.eos_token
    for text in (
        f"What does {special} mean?",
        "<|im_start|>user\nHe?<|im_end|>\n<|im_start|>bot\n",
    ):
        with pytest.raises(DataError, match=r"Send the messages; or add \?rendered=1"):
            sent(contract, text, "No.")
        said = group_of((Message("user", text),), ("No.",), group_id="")
        assert sent(contract, text, "No.", False) == whole(contract.encode([said])[0])
        assert sent(contract, text, "No.", True)


def test_the_text_is_the_same_on_every_day(tmp_path):
    """Also for a program that only has the saved tokenizer."""
    contract = contract_of(made.llama_31(), today=date(2024, 3, 1))
    assert contract.rules.pinned_date == "01 Mar 2024"
    contract.tokenizer.save_pretrained(tmp_path)
    talk = as_dicts(TALKS[0])
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(talk, tokenize=False)
    assert text.startswith("<|begin|><|start|>system\n\nToday Date: 01 Mar 2024\n\n<|eot|>")
    assert contract.render(tuple(TALKS[0])) == text
    # Drawn up again on another day, as a resumed run would: nothing moves.
    again = contract_of(contract.tokenizer, today=date(2025, 9, 9))
    assert again.render(tuple(TALKS[0])) == text
    assert again.rules.template_sha256 == contract.rules.template_sha256


def test_variables_of_the_template_reach_every_program(tmp_path):
    tokenizer = made.make_tokenizer(template="{{ 'deep' if deep else 'flat' }} " + made.BARE)
    contract = contract_of(tokenizer, template_kwargs={"deep": True}, append_eos=False)
    assert contract.render(QUESTION).startswith("deep [user]")
    contract.tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.apply_chat_template(as_dicts(QUESTION), tokenize=False) == contract.render(
        QUESTION
    )
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.tokenize"):
        contract_of(template_kwargs={"tokenize": True})


def test_a_system_message_first():
    talk = (Message("system", "Be brief."), *QUESTION, Message("assistant", "Here."))
    group = Group(id="g", prompt=talk[:2], completions_G=(Completion(messages=talk[2:]),))
    for make in (made.chatml, made.llama_31):
        contract = contract_of(make())
        assert "Be brief." in contract.render(talk)
        assert len(contract.encode([group])) == 1
    contract = contract_of(made.gemma())
    with pytest.raises(DataError) as caught:
        contract.encode([group], sources=["train.jsonl:17"])
    text = str(caught.value)
    assert text.startswith("train.jsonl:17: the chat template cannot render")
    for part in ("[system, user, assistant]", "System role not supported", "chatml", ".jinja"):
        assert part in text
    with pytest.raises(DataError, match=r"^g: "):
        contract.encode([group])


def test_a_conversation_without_a_token_is_refused_with_its_source():
    contract = contract_of(
        made.make_tokenizer(bos=None, eos=None, template="{{ messages[1]['content'] }}")
    )
    groups = [group_of(QUESTION, ["a"], group_id="1"), group_of(QUESTION, ["b", ""], group_id="2")]
    with pytest.raises(DataError, match=r"^rows.jsonl:2: .* without a single token"):
        contract.encode(groups, sources=["rows.jsonl:1", "rows.jsonl:2"])


def test_a_template_that_leaves_out_the_answer_is_refused():
    contract = contract_of(made.make_tokenizer(template="{{ messages[0]['content'] }}"))
    with pytest.raises(ModelError, match="leaves out the assistant message"):
        check_rendering(contract)
    check_rendering(contract_of())


def test_a_template_that_ends_in_the_padding_token_is_refused():
    """It is not the EOS, so the check of the tokenizer alone cannot see it."""
    contract = contract_of(made.make_tokenizer(template=made.BARE + "<pad>"), append_eos=False)
    with pytest.raises(ModelError, match=r"ends a conversation with the padding token '<pad>'"):
        check_rendering(contract)


def test_encoders_get_the_special_tokens_of_their_tokenizer():
    tokenizer = made.make_tokenizer(template=made.BARE, adds_bos=True)
    contract = contract_of(tokenizer, pooled="model", max_length=8)
    assert contract.render(QUESTION) == "[user] Where is the laurel? "
    (tokens,) = contract.encode([group_of((), ["abcdef"], group_id="g")])
    (ids,) = whole(tokens)
    text = "[assistant] abcdef "
    assert ids == [*tokenizer(text)["input_ids"][:7], tokenizer(text)["input_ids"][-1]]
    assert ids[0] == tokenizer.bos_token_id
    assert tokens.truncated_G == (True,)


def test_the_trunk_is_the_longest_prefix_that_all_share():
    contract = contract_of()
    group = group_of(QUESTION, ["By the gate.", "By the wall.", "By"], group_id="g")
    (tokens,) = contract.encode([group])
    ids_G = whole(tokens)
    shared = len(tokens.trunk_ids)
    text = contract.tokenizer.decode(tokens.trunk_ids)
    assert text == ("<|im_start|>user\nWhere is the laurel?<|im_end|>\n<|im_start|>assistant\nBy")
    assert len({tuple(ids[:shared]) for ids in ids_G}) == 1
    assert len({ids[shared] for ids in ids_G}) > 1
    assert tokens.num_tokens == shared + sum(len(ids) - shared for ids in ids_G)
    same, single = contract.encode(
        [group_of(QUESTION, answers, group_id="g") for answers in (["By"] * 2, ["By"])]
    )
    assert [len(ids) for ids in same.branches_ids_G] == [1, 1], "each keeps a token"
    assert len(single.trunk_ids) == 0
    assert whole(single) == whole(same)[:1] == ids_G[2:]


def test_order_and_company_change_no_token():
    contract = contract_of(max_length=60)
    groups = [group_of(QUESTION, [f"{i} " * i, "x"], group_id=str(i)) for i in range(1, 30)]
    together = contract.encode(groups)
    assert [tokens.id for tokens in together] == [group.id for group in groups]
    assert any(any(tokens.truncated_G) for tokens in together)
    for group, tokens in zip(groups, together, strict=True):
        for index, ids in enumerate(whole(tokens)):
            alone = Group(id="", prompt=group.prompt, completions_G=(group.completions_G[index],))
            (single,) = contract.encode([alone])
            assert whole(single) == [ids]
            assert single.truncated_G == (tokens.truncated_G[index],)
    assert contract.encode([]) == []


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(rows=SEQUENCES)
def test_shared_prefix(rows):
    length = shared_prefix([np.array(row) for row in rows])
    shortest = min(len(row) for row in rows)
    assert 0 <= length < shortest
    assert all(row[:length] == rows[0][:length] for row in rows)
    is_longest = length == shortest - 1 or len({row[length] for row in rows}) > 1
    assert is_longest


def cut(ids, *, side, max_length, bos=None):
    """What is left of ids by the rules, worked out independently."""
    if len(ids) <= max_length:
        return ids
    if side == "right":
        return ids[: max_length - 1] + ids[-1:]
    return ([bos] if ids[0] == bos else []) + ids[-(max_length - (ids[0] == bos)) :]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_length", [2, 3, 20, 61, 62, 63, 1000])
def test_truncation_keeps_bos_and_the_token_that_is_scored(name, side, max_length):
    group = group_of(QUESTION, ["Here.", "By the western gate, under the wall."], group_id="g")
    full_contract = contract_of(TOKENIZERS[name]())
    (full,) = full_contract.encode([group])
    contract = contract_of(TOKENIZERS[name](), truncation_side=side, max_length=max_length)
    (tokens,) = contract.encode([group])
    bos = contract.rules.bos_id
    for ids, original, was_cut in zip(whole(tokens), whole(full), tokens.truncated_G, strict=True):
        assert ids == cut(original, side=side, max_length=max_length, bos=bos)
        assert ids[-1] == original[-1]
        assert len(ids) == min(len(original), max_length)
        assert was_cut == (len(original) > max_length)
        if bos is not None:
            assert ids[0] == bos
    assert all(len(ids) >= 1 for ids in tokens.branches_ids_G)


def saved(tmp_path, **rules):
    contract = contract_of(made.llama_31(), max_length=64, truncation_side="right")
    contract = contract.with_rules(**rules)
    contract.tokenizer.save_pretrained(tmp_path)
    contract.save(tmp_path)
    return contract


def test_the_rules_come_back_as_they_were_saved(tmp_path):
    golden = GoldenScore(messages=tuple(TALKS[0]), values_K=(0.1, -2.5e-8), num_tokens=9)
    contract = saved(
        tmp_path,
        golden=(golden,),
        mean=0.25,
        std=1.5,
        num_reference=12,
        attributes=("helpfulness", "correctness"),
        attribute_weights=(0.5, 2.0),
        versions={"torch": "2"},
        golden_dtype="bfloat16",
    )
    loaded = ScoringContract.load(tmp_path, AutoTokenizer.from_pretrained(tmp_path))
    assert loaded.rules == contract.rules
    assert ScoringRules.read(tmp_path) == contract.rules
    group = group_of(QUESTION, ["Here.", "x" * 99], group_id="g")
    assert whole(loaded.encode([group])[0]) == whole(contract.encode([group])[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace('"max_length"', '"longest"'), "longest"),
        (lambda text: text.replace('"format": 2', '"format": 3'), "has format 3; this version"),
        (lambda text: "[]", "cannot be read"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, change, message):
    saved(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        ScoringContract.load(tmp_path, AutoTokenizer.from_pretrained(tmp_path))


def test_the_reward_of_several_attributes():
    contract = contract_of(attributes=("a", "b", "c"), attribute_weights=(0.5, 2.0, -1.0))
    assert contract.scalar([1.0, 2.0, 3.0]) == 1.5  # 0.5 + 4 - 3
    assert contract_of(attributes=("a", "b", "c")).scalar([1.0, 2.0, 6.0]) == 3.0  # their mean
    assert contract_of().scalar([-0.7]) == -0.7


def test_an_altered_tokenizer_is_refused(tmp_path):
    contract = saved(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for template in (CHATML, None):
        tokenizer.chat_template = template
        with pytest.raises(CheckpointError, match=r"template is not the one.*chat_template.jinja"):
            ScoringContract.load(tmp_path, tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = "<|start|>"
    now, then = tokenizer.pad_token_id, contract.rules.pad_id
    with pytest.raises(
        CheckpointError, match=f"pad is token {now}, the model was trained with {then}"
    ):
        ScoringContract.load(tmp_path, tokenizer)

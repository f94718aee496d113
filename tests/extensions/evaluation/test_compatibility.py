"""Scores by the reference's tokens: equal where these agree, its arithmetic where they differ."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from laurel.extensions.evaluation.rewardbench_tokens import (
    BOS,
    CONTROL,
    CUT,
    FAILS,
    ROLES,
    SPECIAL,
    TEXT,
    ReferenceFormat,
    RewardBenchContract,
    differences,
    summary,
)
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ModelSpec
from laurel.models.tokenizer import CHATML
from laurel.rewards.open import open_local
from laurel.rewards.scorer import LocalScorer
from laurel.types import Message, group_of
from model_directories import save_model
from reward_models import small_model
from tiny import tiny_classifier
from tiny_tokenizers import gemma, make_tokenizer

FORM = ReferenceFormat(program="it", truncation_side="left")


def made(**chosen):
    """With the tokens of ChatML."""
    return make_tokenizer(more=("<|im_start|>", "<|im_end|>"), **chosen)


def reference_of(tokenizer, *, max_length=2048, own_length=2048):
    own = ScoringContract.create(
        copy.deepcopy(tokenizer), max_length=own_length, truncation_side="left", append_eos=False
    )
    form = ReferenceFormat(program="it", truncation_side="left", max_length=max_length)
    return RewardBenchContract(own, tokenizer, pad_id=tokenizer.pad_token_id, form=form)


def asked(prompt, *answers):
    return group_of((Message("user", prompt),), answers, group_id=prompt)


@pytest.mark.parametrize(
    ("tokenizer", "lengths", "prompt", "reasons", "is_read"),
    [
        # Without a BOS of the template, the contract writes one there; the reference adds it.
        (made(template=CHATML, adds_bos=True), (99, 99), "q", None, False),
        (made(template=CHATML), (99, 99), "q", None, False),
        (made(template="{{ bos_token }}" + CHATML, adds_bos=True), (99, 99), "q", (BOS,), False),
        (made(template=CHATML), (20, 99), "q", (CUT,), True),
        (made(template=CHATML), (99, 20), "q", (CUT,), True),
        (made(template=CHATML), (20, 20), "q", None, False),
        (made(template="{{ bos_token }}" + CHATML), (20, 20), "q", (CUT,), True),
        (gemma(), (99, 99), "q", (BOS,), False),
    ],
)
def test_reasons(tokenizer, lengths, prompt, reasons, is_read):
    max_length, own_length = lengths
    reference = reference_of(tokenizer, max_length=max_length, own_length=own_length)
    ((found,),) = differences(reference, [asked(prompt, "an answer")])
    assert (found and found.reasons) == reasons
    assert (found is not None and found.is_read) == is_read


def test_roles_text_and_failures():
    system = (Message("system", "s"), Message("user", "q"), Message("assistant", "a"))
    groups = [
        group_of(system, ("b",), group_id="roles"),
        group_of(system[:2], ("b",), group_id="f"),
    ]
    found = differences(reference_of(made(template=CHATML)), groups)
    assert [one.reasons for (one,) in found if one is not None] == [(ROLES,), (FAILS,)]
    told = summary(found)
    assert (told["num_rows"], told["num_rows_read_differently"]) == (2, 2)
    assert told["reasons"] == {
        reason: {"num_rows": 1, "num_completions": 1} for reason in (ROLES, FAILS)
    }
    other = made(template=CHATML)
    reference = reference_of(other)
    other.chat_template = CHATML.replace("\n", " ")
    ((one,),) = differences(reference, [asked("q", "a")])
    assert one is not None
    assert one.reasons == (TEXT,)
    adding = made(template=CHATML)
    reference = reference_of(adding)
    reference.tokenizer = made(template=CHATML, adds_bos=True)
    ((one,),) = differences(reference, [asked("q", "a")])
    assert one is not None
    assert one.reasons == (SPECIAL,)
    ((one,),) = differences(reference_of(made(template=CHATML)), [asked("q", "a</s>b")])
    assert one is not None
    assert one.reasons == (CONTROL,)


WORDS = st.text(st.sampled_from("abc d\nü"), min_size=1, max_size=12)


@given(st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=3)), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_where_tokens_agree_scores_are_equal_to_the_last_bit(rows):
    loaded = _loaded()
    reference = RewardBenchContract(
        loaded.contract,
        copy.deepcopy(loaded.contract.tokenizer),
        pad_id=loaded.contract.rules.pad_id,
        form=FORM,
    )
    groups = [asked(prompt, *answers) for prompt, answers in rows]
    assert summary(differences(reference, groups))["num_rows"] == 0
    scores = [
        [score.value for scores_G in scorer.score_now(groups) for score in scores_G]
        for scorer in (
            LocalScorer(loaded.model, loaded.contract),
            LocalScorer(loaded.model, reference),
        )
    ]
    assert scores[0] == scores[1]


_MODELS: list[Any] = []


def _loaded():
    if not _MODELS:
        _MODELS.append(small_model(max_length=512))
    return _MODELS[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_of_a_padded_batch_with_the_first_bos_hidden(tmp_path, side):
    """The reference's arithmetic, done here by Hugging Face alone."""
    tokenizer = made(template="{{ bos_token }}" + CHATML, adds_bos=True)
    tokenizer.padding_side = side
    network = tiny_classifier(
        "qwen3", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    save_model(tmp_path, network, tokenizer)
    groups = [asked("Where?", "By the gate.", "No."), asked("Who? " * 30, "An old man", "x" * 60)]
    scorer = open_local(str(tmp_path), say=lambda _: None)
    form = ReferenceFormat(program="it", truncation_side="left", max_length=80)
    reference = RewardBenchContract.beside(
        scorer.contract, ModelSpec(name=str(tmp_path)), form=form
    )
    found = LocalScorer(scorer.model, reference).score_now(groups)
    assert [score.truncated for scores_G in found for score in scores_G] == [
        False,
        False,
        True,
        True,
    ]

    texts = [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in group.conversation(i)], tokenize=False
        )
        for group in groups
        for i in range(2)
    ]
    tokenizer.truncation_side = "left"
    batch = tokenizer(texts, truncation=True, max_length=80, padding=True, return_tensors="pt")
    ids_NL, mask_NL = batch["input_ids"], batch["attention_mask"]
    num_hidden = 0
    for row, first in enumerate(mask_NL.argmax(dim=1).tolist()):
        if ids_NL[row, first] == ids_NL[row, first + 1] == tokenizer.bos_token_id:
            mask_NL[row, first] = 0
            num_hidden += 1
    assert num_hidden == 2, "the two that are cut have lost theirs"
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids_NL, attention_mask=mask_NL).logits[:, 0].tolist()
    values = [score.value for scores_G in found for score in scores_G]
    assert values == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1

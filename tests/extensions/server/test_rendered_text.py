"""Text that clients rendered is scored as the template would have ended it, or refused."""

import re
from datetime import date
from functools import cache, partial

import pytest
from pydantic import TypeAdapter

import tiny_tokenizers as made
from laurel.errors import DataError
from laurel.extensions.server import foreign
from laurel.extensions.server.app import _SCORES, EitherScoreRequest
from laurel.models.scoring import ScoringContract
from laurel.models.tokenizer import CONCATENATION, PLAIN, render
from laurel.rewards.preparing import rendered_rows
from laurel.rewards.remote.wire import SCORE_PATH, ScoreRequest, messages_of, validated
from laurel.types import Message

QUESTION, ANSWER = "Where is the laurel?", " By the <western> gate.\n"
TALKS = {
    "one turn": (Message("user", QUESTION),),
    "two turns": (
        Message("user", "Who is it?"),
        Message("assistant", "A friend."),
        Message("user", QUESTION),
    ),
}
TEMPLATES = {
    "chatml": made.chatml,
    "llama 3": made.llama_31,
    "gemma": made.gemma,
    "mistral": made.mistral,
    "qwen 3": made.qwen_3,
    "r1": made.r1,
    "plain": partial(made.make_tokenizer, template=PLAIN),
}


@cache
def contract_of(name, *, append_eos=True):
    return ScoringContract.create(
        TEMPLATES[name](), max_length=4096, truncation_side="left", append_eos=append_eos
    )


def whole(tokens):
    return [[*tokens.trunk_ids.tolist(), *ids.tolist()] for ids in tokens.branches_ids_G]


def ids_of(contract, form, body, **context):
    """The ids that the server reads for the only conversation of a body."""
    (group,) = validated(TypeAdapter(form).validate_python, body, **context).as_groups
    rows = rendered_rows(group)
    if rows is None:
        return whole(contract.encode([group])[0])[0]
    (row,) = rows
    return whole(contract.encode_rendered(row))[0]


def tokens_of(contract, text):
    return contract.tokenizer(text, add_special_tokens=False)["input_ids"]


# What a client sends for a whole text: its form and its body. `/get_reward` knows the prompt, too.
WHOLE_TEXTS = {
    "/get_reward": lambda c, text: (foreign.GetRewardRequest, {"query": [text]}),
    "/classify": lambda c, text: (foreign.ClassifyRequest, {"input": text}),
    "/classify ids": lambda c, text: (foreign.ClassifyRequest, {"input": tokens_of(c, text)}),
    "/classify SGLang": lambda c, text: (foreign.ClassifyRequest, {"text": [text]}),
    "/pooling": lambda c, text: (foreign.PoolingRequest, {"input": [text]}),
    "/v1/embeddings": lambda c, text: (foreign.EmbeddingsRequest, {"input": [text]}),
    "/v1/embeddings ids": lambda c, text: (
        foreign.EmbeddingsRequest,
        {"input": [tokens_of(c, text)]},
    ),
}
# And for a prompt and its response.
TURNS = {
    "/get_reward": lambda prompt, response: (
        foreign.GetRewardRequest,
        {"query": [prompt + response], "prompts": [prompt]},
    ),
    "/remote_rm": lambda prompt, response: (
        foreign.RemoteRmRequest,
        {"prompt": prompt, "response": response},
    ),
}
# And for messages.
MESSAGES = {
    "/v1/score": lambda talk, answer: (
        ScoreRequest,
        {"groups": [{"id": "", "prompt": messages_of(talk), "completions": [answer]}]},
    ),
    "/classify": lambda talk, answer: (
        foreign.ClassifyRequest,
        {"messages": messages_of((*talk, Message("assistant", answer)))},
    ),
    "/pooling": lambda talk, answer: (
        foreign.PoolingRequest,
        {"messages": messages_of((*talk, Message("assistant", answer)))},
    ),
    "/score": lambda talk, answer: (
        foreign.PairsRequest,
        {"queries": talk[0].content, "documents": answer},
    ),
    "/remote_rm": lambda talk, answer: (
        foreign.RemoteRmRequest,
        {"prompt": messages_of(talk), "response": answer},
    ),
}


def test_every_path_that_scores_is_walked():
    walked = {name.partition(" ")[0] for name in (*WHOLE_TEXTS, *TURNS, *MESSAGES)}
    assert walked == {*_SCORES}
    assert SCORE_PATH in walked
    TypeAdapter(EitherScoreRequest)


def wanted(contract, talk, answer=ANSWER):
    return ids_of(contract, *MESSAGES["/v1/score"](talk, answer))


def prompts_of(contract, talk):
    """The prompts that trainers make of a conversation: as the template asks, also without thought,
    and what it writes before a given answer.
    """
    kwargs = contract.rules.template_kwargs
    asks = [render(contract.tokenizer, talk, kwargs, prompt=True)]
    asks.append(render(contract.tokenizer, talk, {"enable_thinking": False}, prompt=True))
    whole_text = contract.render((*talk, Message("assistant", "X said X")))
    return dict.fromkeys([*asks, whole_text.rpartition("X said X")[0]])


def endings_of(contract):
    """What may stand behind an answer: all that the template writes, parts of it, and more."""
    tokenizer = contract.tokenizer
    text = contract.render((Message("user", "q"), Message("assistant", "X said X")))
    end = text.rpartition("X said X")[2]
    mark = end.rstrip()
    return dict.fromkeys(
        [
            end,
            "",  # cut at a limit
            mark,  # the sampled token
            f"{mark}\n",
            f"{mark}\n\n",
            f"{mark}{tokenizer.pad_token * 3}",
            f"{end}{tokenizer.eos_token}",
            tokenizer.eos_token,
        ]
    )


def openings_of(contract, text):
    """The same text without BOS, with two, and with the padding of a batch."""
    bos, pad = contract.tokenizer.bos_token or "", contract.tokenizer.pad_token
    bare = text.removeprefix(bos)
    return dict.fromkeys([text, bare, bos + text, pad * 2 + text])


@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_text_is_scored_as_its_messages(name, talk, append_eos):
    contract = contract_of(name, append_eos=append_eos)
    # Blanks around an answer cannot be told from this template's own.
    answer = ANSWER.strip() if name == "plain" else ANSWER
    expected = wanted(contract, talk, answer)
    for prompt in prompts_of(contract, talk):
        for end in endings_of(contract):
            for path, form in TURNS.items():
                assert ids_of(contract, *form(prompt, answer + end)) == expected, (path, end)
            for path, form in WHOLE_TEXTS.items():
                text = prompt + answer + end
                assert ids_of(contract, *form(contract, text)) == expected, (path, prompt, end)
        for text in openings_of(contract, prompt + answer):
            for path, form in WHOLE_TEXTS.items():
                assert ids_of(contract, *form(contract, text)) == expected, (path, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_scored_as_messages_on_every_path(name):
    contract = contract_of(name)
    talk = TALKS["one turn"]
    for path, form in MESSAGES.items():
        assert ids_of(contract, *form(talk, ANSWER)) == wanted(contract, talk), path
    for end in endings_of(contract):  # slime keeps the sampled token
        turn = MESSAGES["/remote_rm"](talk, ANSWER + end)
        assert ids_of(contract, *turn) == wanted(contract, talk), end
        said = TURNS["/get_reward"](QUESTION, ANSWER + end)
        assert ids_of(contract, *said) == wanted(contract, talk), "a prompt that no one rendered"
    # What a trainer decodes begins with the BOS that its tokenizer adds, and with padding.
    opening = contract.tokenizer.pad_token * 2 + (contract.tokenizer.bos_token or "")
    decoded = {"query": [opening + QUESTION + ANSWER], "prompts": [QUESTION]}
    for context in ({}, {"rendered": False}):
        found = ids_of(contract, foreign.GetRewardRequest, decoded, **context)
        assert found == wanted(contract, talk), context


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_answer_is_told_from_none(name):
    contract = contract_of(name)
    talk = TALKS["two turns"]
    for prompt in prompts_of(contract, talk):
        ended = f"{prompt}{contract.tokenizer.eos_token}"
        expected = wanted(contract, talk, "")
        for path, form in WHOLE_TEXTS.items():
            assert ids_of(contract, *form(contract, ended)) == expected, path
            with pytest.raises(DataError, match="asks for an answer, and holds none"):
                ids_of(contract, *form(contract, prompt))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_no_answer_of_this_template_is_refused(name):
    contract = contract_of(name)
    talk = TALKS["one turn"]
    other = contract_of("chatml" if name == "gemma" else "gemma")
    for text in (
        f"{QUESTION} {ANSWER}",
        next(iter(prompts_of(other, talk))) + ANSWER,
        contract.render((*talk, Message("assistant", ANSWER), talk[0])),
    ):
        if name == "plain" and "User: " in text:
            continue  # it has no marks, so what follows counts as the answer
        for path, form in WHOLE_TEXTS.items():
            with pytest.raises(DataError, match=r"holds (no answer|none|'.*', which)|do not end"):
                print(path, text, ids_of(contract, *form(contract, text)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_mark_of_the_template_within_the_answer_is_refused(name):
    contract = contract_of(name)
    (prompt, *_) = prompts_of(contract, TALKS["two turns"])
    added = contract.tokenizer.added_tokens_decoder.values()
    for mark in (token.content for token in added if token.special):
        for path, form in TURNS.items():
            with pytest.raises(DataError, match=f"the answer holds {re.escape(repr(mark))}"):
                print(path, ids_of(contract, *form(prompt, f"By {mark} the gate.")))
    if name == "plain":
        return
    # An answer that opens turns of its own: only a client that sends the prompt shows it.
    end = contract.render((*TALKS["one turn"], Message("assistant", "X"))).rpartition("X")[2]
    for form in TURNS.values():
        with pytest.raises(DataError, match="the answer holds"):
            ids_of(contract, *form(prompt, f"By the gate.{end}{prompt}Fine."))


def test_the_date_of_the_client_becomes_that_of_the_model():
    contract, later = (
        ScoringContract.create(
            made.llama_31(), max_length=4096, truncation_side="left", append_eos=True, today=day
        )
        for day in (date(2024, 7, 26), date(2031, 12, 1))
    )
    for talk in (TALKS["two turns"], (Message("system", "Be brief."), *TALKS["one turn"])):
        text = later.render((*talk, Message("assistant", ANSWER)))
        assert "01 Dec 2031" in text
        for form in WHOLE_TEXTS.values():
            assert ids_of(contract, *form(contract, text)) == wanted(contract, talk)


def test_ids_that_were_cut_are_scored_as_they_are():
    """Laurel's own client sends ids that the contract has cut."""
    for side in ("left", "right"):
        contract = contract_of("chatml").with_rules(max_length=20, truncation_side=side)
        (talk, longer) = TALKS.values()
        for prompt in (talk, longer):
            expected = wanted(contract, prompt)
            assert len(expected) == 20
            assert ids_of(contract, foreign.ClassifyRequest, {"input_ids": expected}) == expected


def test_contents_alone_are_a_text_of_the_template_that_joins_contents():
    tokenizer = made.make_tokenizer(template=CONCATENATION)
    contract = ScoringContract.create(
        tokenizer, max_length=4096, truncation_side="left", append_eos=True
    )
    expected = wanted(contract, (Message("user", "Where? "),), "Here.")
    for text in ("Where? Here.", "<s><s>Where? Here.</s>", "<s>Where? Here.</s></s>"):
        for path, form in WHOLE_TEXTS.items():
            assert ids_of(contract, *form(contract, text)) == expected, path


WORDY = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n### End\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)


def test_words_of_the_answer_that_also_end_a_turn_stay():
    tokenizer = made.make_tokenizer(template=WORDY)
    contract = ScoringContract.create(
        tokenizer, max_length=4096, truncation_side="left", append_eos=True
    )
    talk = TALKS["one turn"]
    (prompt, *_) = prompts_of(contract, talk)
    for answer in ("This is the End", "A heading: ###"):
        expected = wanted(contract, talk, answer)
        for end in ("", "\n### End", "\n### End\n", f"\n### End\n{tokenizer.eos_token}"):
            for form in TURNS.values():
                assert ids_of(contract, *form(prompt, answer + end)) == expected, (answer, end)

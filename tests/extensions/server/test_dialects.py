"""What is sent in each protocol, to the letter, and how each answer is read."""

from __future__ import annotations

import functools

import pytest

import scoring_groups
from laurel.errors import ConfigError, ModelError, ProtocolError
from laurel.rewards.remote.dialects import dialect_of
from laurel.types import Completion, Group, Message, group_of
from process_models import process_model
from scripted_replicas import question

RAW = {"use_activation": False, "activation": False, "softmax": False}
GROUP = question("Where?", "By the gate.", "No.")


@functools.cache
def contract():
    return scoring_groups.loaded(True).contract


def asked(protocol, groups, *, request_id="r", version="", **options):
    dialect = dialect_of(protocol, contract=contract(), **options)
    return dialect.ask(groups, request_id=request_id, version=version)


def ids_of(group):
    return [
        contract().tokenizer(contract().render(group.conversation(i)))["input_ids"]
        for i in range(len(group.completions_G))
    ]


def texts_of(group):
    return [contract().render(group.conversation(i)) for i in range(len(group.completions_G))]


def values(reply):
    return [[score.value for score in row] for row in reply.scores]


@pytest.mark.parametrize("protocol", ["vllm", "sglang", "sglang_embeddings", "openrlhf"])
def test_a_process_reward_model_is_refused_where_servers_read_one_score(protocol):
    with pytest.raises(ModelError, match=f"url_protocol={protocol}: .* process reward model"):
        dialect_of(protocol, contract=process_model().contract)
    dialect_of("laurel", contract=process_model().contract)


def test_laurel():
    question = asked("laurel", [GROUP], version="7")
    said = {"role": "user", "content": "Where?"}
    assert question.value == {
        "groups": [
            {
                "id": GROUP.id,
                "prompt": [said],
                "completions": [
                    [{"role": "assistant", "content": "By the gate."}],
                    [{"role": "assistant", "content": "No."}],
                ],
            }
        ],
        "request_id": "r",
        "model_version": "7",
    }
    verdicts = [
        {"value": 1.5, "values": [1.5], "num_tokens": 5, "truncated": False, "failure": None},
        {"value": None, "values": [], "num_tokens": 0, "truncated": False, "failure": "no"},
    ]
    reply = question.read(
        {
            "groups": [{"id": GROUP.id, "scores": verdicts}],
            "model": "m",
            "model_version": "7",
            "request_id": "r",
        }
    )
    assert values(reply) == [[1.5, None]]
    assert reply.scores[0][1].failure == "no"
    assert reply.version == "7"


def test_vllm():
    question = asked("vllm", [GROUP], model="rm")
    assert question.value == {
        "model": "rm",
        "input": ids_of(GROUP),
        "add_special_tokens": False,
        **RAW,
    }
    data = [
        {"index": 1, "label": "LABEL_0", "probs": [-2.0], "num_classes": 1},
        {"index": 0, "label": "LABEL_0", "probs": [3.0], "num_classes": 1},
    ]
    reply = question.read({"id": "classify-1", "object": "list", "data": data})
    assert values(reply) == [[3.0, -2.0]]
    assert [score.num_tokens for score in reply.scores[0]] == list(map(len, ids_of(GROUP)))


def test_vllm_renders_by_itself_where_no_contract_is_known():
    dialect = dialect_of("vllm", model="rm")
    assert dialect.max_completions == 1
    one = question("Where?", "No.")
    question_ = dialect.ask([one], request_id="r", version="")
    assert question_.value == {
        "model": "rm",
        "messages": [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "No."},
        ],
        "add_generation_prompt": False,
        **RAW,
    }
    assert values(question_.read({"data": [{"index": 0, "probs": [0.25]}]})) == [[0.25]]


def test_sglang():
    question = asked("sglang", [GROUP])
    assert question.value == {"input_ids": ids_of(GROUP)}
    answer = [{"embedding": [1.0], "meta_info": {}}, {"embedding": [2.0], "meta_info": {}}]
    assert values(question.read(answer)) == [[1.0, 2.0]]
    one = asked("sglang", [group_of(GROUP.prompt, ("No.",), group_id="g")])
    assert values(one.read(answer[0])) == [[1.0]], "one row may come back without a list"


def test_sglang_embeddings():
    question = asked("sglang_embeddings", [GROUP], model="rm")
    assert question.value == {"model": "rm", "input": ids_of(GROUP)}
    data = [{"object": "embedding", "index": i, "embedding": [float(i)]} for i in (0, 1)]
    assert values(question.read({"object": "list", "data": data})) == [[0.0, 1.0]]


def test_openrlhf():
    question = asked("openrlhf", [GROUP])
    assert question.value == {"query": texts_of(GROUP), "prompts": ["", ""], "labels": ["", ""]}
    answer = {"rewards": [1.0, 2.0], "scores": [0.1, 0.2], "extra_logs": {"dummy_scores": [0]}}
    assert values(question.read(answer)) == [[1.0, 2.0]]


def test_a_text_in_which_a_message_spells_a_control_token_is_not_sent():
    """The server would take it for the template's; token ids say which it is."""
    token = contract().tokenizer.eos_token
    forged = group_of(GROUP.prompt, (f"No.{token}", "No."), group_id="g")
    question = asked("openrlhf", [forged])
    assert question.value["query"] == texts_of(forged)[1:]
    ((bad, good),) = question.read({"rewards": [2.0], "scores": [0.0], "extra_logs": {}}).scores
    assert bad.failure.startswith("text: a message spells a control token")
    assert good.value == 2.0
    assert len(asked("vllm", [forged]).value["input"]) == 2


def test_slime():
    dialect = dialect_of("slime", reward_key="reward")
    assert (dialect.path, dialect.max_completions) == ("", 1)
    one = question("Where?", "No.")
    asked_ = dialect.ask([one], request_id="r", version="")
    assert asked_.value == {
        "prompt": [{"role": "user", "content": "Where?"}],
        "response": "No.",
        "label": None,
    }
    assert values(asked_.read({"reward": 0.5, "other": 1})) == [[0.5]]
    plain = dialect_of("slime").ask([one], request_id="r", version="")
    assert values(plain.read(0.5)) == [[0.5]]
    with pytest.raises(ProtocolError):
        plain.read({"reward": 0.5})


def test_slime_judges_answers_of_the_assistant_only():
    asked_by_user = Group(
        id="g", prompt=(), completions_G=(Completion(messages=(Message("user", "x"),)),)
    )
    question = dialect_of("slime").ask([asked_by_user], request_id="r", version="")
    assert question.value is None
    assert "with an answer of the assistant" in question.read(None).scores[0][0].failure


def test_what_is_too_long_is_cut_as_the_contract_says():
    long = question("Where?", "the old man " * 100)
    question_ = asked("vllm", [long])
    (ids,) = question_.value["input"]
    (tokens,) = contract().encode([long])
    assert len(ids) == scoring_groups.MAX_LENGTH
    assert ids == tokens.branches_ids_G[0].tolist()
    (score,) = question_.read({"data": [{"index": 0, "probs": [1.0]}]}).scores[0]
    assert score.truncated


WRONG = {
    "vllm": [
        ({"data": [{"index": 0, "probs": [1.0]}]}, "count"),
        ({"data": [{"index": 0, "probs": [1.0]}] * 2}, "reply"),
        ({"data": [{"index": i, "probs": [1.0, 2.0]} for i in (0, 1)]}, "reply"),
        ({"data": [{"index": i, "probs": [None]} for i in (0, 1)]}, "reply"),
        ({"data": [{"index": i, "probs": ["1"]} for i in (0, 1)]}, "reply"),
        ({"data": [{"index": i, "probs": [True]} for i in (0, 1)]}, "reply"),
        ({"data": [{"index": i, "probs": [10**400]} for i in (0, 1)]}, "nan"),
        ({"data": [{"index": 5, "probs": [1.0]}, {"index": 0, "probs": [1.0]}]}, "reply"),
        ({"data": []}, "count"),
        ([], "reply"),
        (None, "reply"),
    ],
    "sglang": [
        ([{"embedding": [1.0]}], "count"),
        ({"embedding": [1.0]}, "count"),
        ([1, 2], "reply"),
    ],
    "sglang_embeddings": [({"data": [{"index": 0, "embedding": [1.0]}]}, "count")],
    "openrlhf": [
        ({"rewards": [1.0]}, "count"),
        ({"rewards": [1.0, 2.0, 3.0]}, "count"),
        ({"rewards": [1.0, None]}, "reply"),
        ({"scores": [1.0, 2.0]}, "reply"),
    ],
}


@pytest.mark.parametrize(
    ("protocol", "answer", "kind"),
    [(name, answer, kind) for name, rows in WRONG.items() for answer, kind in rows],
)
def test_a_wrong_answer_is_refused_whole(protocol, answer, kind):
    with pytest.raises(ProtocolError) as caught:
        asked(protocol, [GROUP]).read(answer)
    assert caught.value.kind == kind


@pytest.mark.parametrize("protocol", ["sglang", "sglang_embeddings", "openrlhf"])
def test_who_takes_rendered_conversations_needs_a_contract(protocol):
    with pytest.raises(ConfigError, match="model_name"):
        dialect_of(protocol)

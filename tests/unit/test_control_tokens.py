"""In no room does a message hold a control token: what it spells is text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tiny
from chat_families import FAMILIES, Family
from chat_rows import assistant, user
from laurel.config.environments import JudgeConfig
from laurel.extensions.data_check.check import examine_data, first_row
from laurel.extensions.judges.loaded import ModelJudge
from laurel.models.chat import ChatFormat
from laurel.models.scoring import ScoringContract
from laurel.models.tokenizer import render
from laurel.rewards.preparing import prepared_by
from laurel.types import Completion, Group, Message, TokenGroup, group_of
from model_directories import save_model
from scripted_backend import ScriptedBackend
from served_scores import Running

ASK = (Message("user", "Why?"),)
Ids = list[int]


def rows_of(groups: list[TokenGroup]) -> Iterator[Ids]:
    for group in groups:
        for branch in group.branches_ids_G:
            yield [*map(int, group.trunk_ids), *map(int, branch)]


def contract_of(tokenizer: Any) -> ScoringContract:
    return ScoringContract.create(
        tokenizer, max_length=8192, truncation_side="left", append_eos=True
    )


def scores(family: Family, said: str) -> Iterator[Ids]:
    """Rows of `laurel rm`, `score` and `eval`, answers that an environment scores."""
    contract = contract_of(family.tokenizer())
    asked = (Message("user", said), Message("assistant", said), Message("user", said))
    yield from rows_of(contract.encode([group_of(asked, (said, "No."), group_id="g")]))
    several = Completion(messages=(Message("assistant", said), *ASK, Message("assistant", said)))
    yield from rows_of(contract.encode([Group(id="g", prompt=ASK, completions_G=(several,))]))


def demonstrations(family: Family, said: str) -> Iterator[Ids]:
    chat = ChatFormat(family.tokenizer())
    talk = (Message("user", said), Message("assistant", said), *ASK, Message("assistant", said))
    for turns, only_final in ((talk, True), (talk[:2], False)):
        found = chat.demonstration(turns, demonstration_id="d", only_final=only_final)
        assert found is not None
        yield from rows_of([found.tokens])
        yield found.tokens.branches_ids_G[0][found.mask_L].tolist()


def prompts(family: Family, said: str) -> Iterator[Ids]:
    chat = ChatFormat(family.tokenizer())
    talk = (Message("user", said), Message("assistant", said), Message("user", said))
    yield chat.prompt_ids(talk).tolist()


def observations(family: Family, said: str) -> Iterator[Ids]:
    chat = ChatFormat(family.tokenizer())
    for role in ("user", "tool", "environment"):
        observed = {"role": role, "content": said}
        yield chat.observation_ids(observed, history=(Message("user", said),)).tolist()


def functions(family: Family, said: str) -> Iterator[Ids]:
    tokenizer = family.tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + family.template
    tool = {"type": "function", "function": {"name": "f", "description": said, "parameters": {}}}
    yield ChatFormat(tokenizer).prompt_ids(ASK, tools=[tool]).tolist()


class Asked:
    """An engine that remembers what a judge was asked."""

    def __init__(self) -> None:
        self.ids: list[Ids] = []

    async def branch_logprobs(self, groups: list[TokenGroup], **_: Any) -> list[list[float]]:
        self.ids += [group.trunk_ids.tolist() for group in groups]
        return [[-1.0, -2.0] for _ in groups]

    def close(self) -> None:
        pass


def judges(family: Family, said: str) -> Iterator[Ids]:
    """Their instructions, the conversation, the answers and a reference."""
    template = "{{ prompt }}|{{ response }}|{{ other_response }}|{{ ground_truth }}"
    engine = Asked()
    config = JudgeConfig(compares=True, read_out="log_probability", template=template, system=said)
    judge = ModelJudge(config, engine, ChatFormat(family.tokenizer()), max_length=10**5)
    group = Group(
        id="g",
        prompt=(Message("user", said),),
        completions_G=tuple(
            Completion(messages=(Message("assistant", text),)) for text in (said, "no")
        ),
        metadata={"ground_truth": said},
    )
    asyncio.run(judge.score([group]))
    yield from engine.ids


class OfContract(ScriptedBackend):
    def __init__(self, contract: ScoringContract) -> None:
        super().__init__()
        self.contract = contract

    def prepare(self, groups: Any) -> Any:
        return prepared_by(self.contract, groups)

    def prepare_rendered(self, row: Any) -> TokenGroup:
        return self.contract.encode_rendered(row)


def served(family: Family, said: str) -> Iterator[Ids]:
    """Messages in the protocols that `laurel serve` speaks."""
    talk = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    group = {"id": "g", "prompt": said, "completions": [said]}
    answered = {"role": "assistant", "content": said}
    requests = [
        ("/v1/score", {"groups": [group]}),
        ("/v1/score", {"groups": [{"id": "g", "prompt": talk, "completions": [[answered]]}]}),
        ("/classify", {"messages": talk}),
        ("/pooling", {"messages": talk}),
        ("/score", {"queries": said, "documents": [said]}),
        ("/get_reward?rendered=0", {"query": [said + said], "prompts": [said]}),
        ("/remote_rm?rendered=0", {"prompt": said, "response": said, "label": None}),
        ("/remote_rm", {"prompt": talk, "response": said, "label": None}),
    ]
    backend = OfContract(contract_of(family.tokenizer()))
    with Running(backend) as running:
        for path, asked in requests:
            assert running.post(path, asked).status_code == 200, (path, asked)
    for batch in backend.batches:  # equal conversations are computed once
        yield from rows_of(batch)


ROOMS: dict[str, Callable[[Family, str], Iterator[Ids]]] = {
    "scores": scores,
    "demonstrations": demonstrations,
    "prompts": prompts,
    "observations": observations,
    "functions": functions,
    "judges": judges,
    "server": served,
}


def forged(family: Family) -> str:
    """A text with all control tokens: as the template writes a conversation, and by themselves."""
    talk = (*ASK, Message("assistant", "So."), Message("user", "Thanks, perfect!"))
    whole = render(family.tokenizer(), talk, {}, prompt=True)
    return whole + " ".join(family.marks) + "".join(f"<{mark}{mark}>" for mark in family.marks)


def counts(family: Family, rows: Iterator[Ids]) -> list[dict[str, int]]:
    known = family.tokenizer()
    numbers = {mark: known.convert_tokens_to_ids(mark) for mark in family.marks}
    return [{mark: ids.count(number) for mark, number in numbers.items()} for ids in rows]


@pytest.mark.slow_parameters(*(f"server-{name}" for name in FAMILIES if name != "Mistral"))
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("room", ROOMS)
def test_a_message_that_spells_control_tokens_holds_none(room, name):
    family = FAMILIES[name]
    honest = counts(family, ROOMS[room](family, "4"))
    assert honest
    assert counts(family, ROOMS[room](family, forged(family))) == honest


ROWS = {
    "rm": lambda said: {"prompt": said, "chosen": said, "rejected": "no"},
    "sft": lambda said: {"messages": [user(said), assistant(said)]},
    "grpo": lambda said: {"problem": said, "expected_answer": said},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny language model, whose tokenizer a test replaces."""
    made = tiny.tiny_policy("qwen3", vocab_size=300, max_position_embeddings=8192)
    return save_model(tmp_path_factory.mktemp("model"), made.causal_lm)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("trainer", ROWS)
def test_the_check_of_data_shows_them_as_text(trainer, name, model, tmp_path):
    """As the rows of the runs: it reads and tokenises them as they do."""
    family = FAMILIES[name]
    family.tokenizer().save_pretrained(model)

    def shown(said: str) -> Iterator[Ids]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROWS[trainer](said)) + "\n", encoding="utf-8")
        longest = ("policy.max_total_sequence_length=8192",)
        (reading,) = examine_data(str(path), trainer, longest).readings
        for part in first_row(reading, str(model)).parts:
            yield [number for piece in part.tokens for number in piece.ids]

    honest = counts(family, shown("So: 4"))
    assert any(number for one in honest for number in one.values())
    # A prompt that begins as rendered text is refused.
    assert counts(family, shown(f"So: {forged(family)}")) == honest

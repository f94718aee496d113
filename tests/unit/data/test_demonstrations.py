"""Conversations to imitate: the forms of rows, what is left out, what is held out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_rows import assistant, system, transcript, user
from laurel.config.sft import DemonstrationDataConfig, DemonstrationSetConfig
from laurel.data.conversations import (
    Dialogue,
    load_demonstration_data,
    load_demonstrations,
)
from laurel.data.reading import hold_out_of_sets
from laurel.errors import DataError
from laurel.types import Message

USER = user("Hello")
GOOD = assistant("Good day.")
TALK = (Message("user", "Hello"), Message("assistant", "Good day."))


@pytest.fixture
def load(write_rows):
    """Loads rows as one set; keywords are those of the set."""

    def run(rows, *, on_bad_row="error", **config):
        if rows is not None:
            config["data_path"] = str(rows if isinstance(rows, Path) else write_rows(rows))
        return load_demonstrations(
            [DemonstrationSetConfig(**config)], name="train", on_bad_row=on_bad_row
        )

    return run


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ({"messages": [USER, GOOD], "prompt": "x", "completion": "y"}, {}),
        ({"talk": [USER, GOOD]}, {"chat_key": "talk"}),
        ({"messages": [USER, GOOD]}, {"dataset_name": "openai_format"}),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hello"},
                    {"from": "gpt", "value": "Good day."},
                ]
            },
            {},
        ),
        ({"conversations": [USER, GOOD]}, {}),
        ({"messages": [USER, {**GOOD, "tool_calls": []}]}, {}),
        ({"prompt": "Hello", "completion": "Good day."}, {}),
        ({"prompt": [USER], "completion": [USER, GOOD]}, {}),
        ({"input": "Hello", "output": "Good day."}, {"dataset_name": "ResponseDataset"}),
        ({"instruction": "Hello", "output": "Good day.", "input": None}, {}),
        ({"a": "Hello", "b": "Good day."}, {"input_key": "a", "output_key": "b"}),
        (
            {"question": "Hello", "answer": "Good day.", "responses": ["a", "b"]},
            {"input_key": "question", "output_key": "answer"},
        ),
        (
            {"problem": "Hello", "generated_solution": "Good day.", "expected_answer": "1"},
            {"dataset_name": "OpenMathInstruct-2"},
        ),
        (
            {
                "context": "Hello",
                "response1": "What?",
                "response2": "Good day.",
                "overall_preference": 1,
            },
            {"dataset_name": "HelpSteer3"},
        ),
        (
            {"chosen": transcript("Hello", "Good day."), "rejected": transcript("Hello", "What?")},
            {},
        ),
    ],
)
def test_forms_of_rows(load, row, config):
    (dialogue,), report = load([row], **config)
    assert dialogue.messages == TALK
    assert dialogue.prompt == TALK[:1]
    assert (dialogue.id, dialogue.source) == ("train:rows.jsonl:1", "rows.jsonl:1")
    assert report.notes[0].startswith("read as ")


def test_solutions_of_gsm8k_box_their_answer(load):
    solution = "He eats 2*3=<<2*3=6>>6 figs.\nIn 200 days 6*200=<<6*200=1200>>1,200.\n#### 1,200"
    row = {"question": "How many figs?", "answer": solution}
    (dialogue,), _ = load([row], dataset_name="GSM8K")
    assert [turn.content for turn in dialogue.messages] == [
        "How many figs?",
        "He eats 2*3=6 figs.\nIn 200 days 6*200=1,200.\nThe answer is \\boxed{1,200}.",
    ]


def test_squad_answers_from_its_context(load):
    rows = [
        {"context": "Bay is laurel.", "question": "What?", "answers": {"text": ["Laurel", "bay"]}},
        {"context": "Bay is laurel.", "question": "Why?", "answers": {"text": []}},
    ]
    (dialogue,), report = load(rows, dataset_name="squad")
    assert [(turn.role, turn.content) for turn in dialogue.messages] == [
        ("system", "Bay is laurel."),
        ("user", "What?"),
        ("assistant", "Laurel"),
    ]
    assert report.dropped["no answer"].count == 1


def test_system_messages_of_rows_and_of_the_configuration(load):
    rows = [
        {"messages": [system("Own."), USER, GOOD], "rules": "Not this."},
        {"messages": [USER, GOOD], "rules": "Be kind."},
        {"messages": [USER, GOOD]},
    ]
    dialogues, _ = load(rows, system_key="rules", system_prompt="Be brief.")
    assert [d.messages[0].content for d in dialogues] == ["Own.", "Be kind.", "Be brief."]
    dialogues, _ = load(rows)
    assert [d.messages[0].role for d in dialogues] == ["system", "user", "user"]


def test_rows_without_a_word_are_counted(load):
    rows = [
        {"prompt": "Hello", "completion": "Good day."},
        {"prompt": "Hello", "completion": " "},
        {"prompt": "", "completion": "Good day."},
    ]
    dialogues, report = load(rows)
    assert len(dialogues) == 1
    assert dict(report.dropped["empty"].kinds) == {
        "the assistant says nothing": 1,
        "nothing is asked": 1,
    }


@pytest.mark.parametrize(
    ("row", "config", "said"),
    [
        ({"text": "Hello"}, {}, "keys text, which say no conversation"),
        ({"messages": "Hello"}, {}, "'messages' is a string"),
        ({"messages": [USER]}, {}, "must end with a message of role 'assistant'"),
        ({"messages": [USER, {**GOOD, "tool_calls": [{}]}]}, {}, "'messages' holds .*'tool_calls'"),
        ({"prompt": "x", "completion": "y"}, {"dataset_name": "openai_format"}, "no 'messages'"),
        ({"conversations": [{"from": "ghost", "value": "Boo"}]}, {}, "'ghost'; known are human"),
        ({"conversations": ["Boo"]}, {}, "no {'from': ..., 'value': ...}: 'Boo'"),
        ({"a": "x"}, {"input_key": "a"}, "no 'output'.*data.output_key"),
        (
            {"question": "x", "answer": "420", "responses": ["a", "b"]},
            {},
            "several answers.*best-of-n",
        ),
    ],
)
def test_rows_that_cannot_be_read_name_their_line(load, row, config, said):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{said}"):
        load([row], **config)
    with pytest.raises(DataError, match=r"nothing is left of 1 row\..*1 malformed"):
        load([row], on_bad_row="skip", **config)


def test_names_that_are_unknown(load):
    with pytest.raises(DataError, match="Did you mean squad"):
        load(None, dataset_name="squat")


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=60).filter(lambda p: len(set(p)) > 1),
    st.floats(0.01, 0.9),
)
def test_equal_prompts_stay_on_one_side(prompts, share):
    dialogues = [
        Dialogue(id=str(n), messages=(Message("user", str(p)), Message("assistant", str(n))))
        for n, p in enumerate(prompts)
    ]
    data = DemonstrationDataConfig(split_validation_size=share, seed=3)
    train, held = hold_out_of_sets(dialogues, data.train_sets())
    assert sorted([*train, *held], key=lambda d: int(d.id)) == dialogues
    assert {d.prompt for d in train}.isdisjoint(d.prompt for d in held)


def test_each_set_has_a_share_of_its_own(write_rows, tmp_path):
    path = str(write_rows([{"prompt": f"{n}?", "completion": "Yes."} for n in range(40)]))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(f'{{"prompt": "{n}!", "completion": "No."}}' for n in range(40)))
    sets = [{"data_path": path, "split_validation_size": 0.25}]
    sets += [{"data_path": str(other), "split_validation_size": 0.0}]
    loaded = load_demonstration_data(DemonstrationDataConfig.model_validate({"train": sets}))
    assert {dialogue.id.partition(":")[0] for dialogue in loaded.validation} == {"train-1"}
    assert len(loaded.validation) == 10


def test_the_whole_section(write_rows):
    path = str(write_rows([{"prompt": f"{n}?", "completion": "Yes."} for n in range(40)]))
    held = load_demonstration_data(DemonstrationDataConfig(train_data_path=path))
    assert (len(held.train), len(held.validation)) == (38, 2)
    assert held.reports["validation"].num_items == 2
    assert held.reports["train"].dropped["held out"].count == 2
    named = load_demonstration_data(
        DemonstrationDataConfig(train_data_path=path, val_data_path=path, max_samples=10)
    )
    assert (len(named.train), len(named.validation)) == (10, 40)
    two = {"train": [{"data_path": path}, {"data_path": path}], "split_validation_size": 0}
    mixed = load_demonstration_data(DemonstrationDataConfig.model_validate(two))
    assert len({d.id for d in mixed.train}) == 80
    assert mixed.reports["train"].num_prompts == 40

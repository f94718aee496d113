"""Tasks from rows: what is asked, what is known, who judges, and what was left out."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chat_rows import assistant, system, user
from laurel.config.data import TaskDataConfig, TaskSetConfig
from laurel.data.reading import read_prompt_frame
from laurel.data.tasks import load_task_data, load_tasks, own_validation_tasks
from laurel.errors import ConfigError, DataError
from laurel.types import Message

ENVIRONMENTS = ("math", "reward_model")
PROMPTS = Path(__file__).parents[3] / "examples" / "prompts"


@pytest.fixture
def load(write_rows):
    """Loads rows as one set; keywords are those of the set and of `load_tasks`."""

    def run(rows, *, on_bad_row="error", limit=None, **config):
        if rows is not None:
            config["data_path"] = str(rows if isinstance(rows, Path) else write_rows(rows))
        return load_tasks(
            [TaskSetConfig(**config)],
            name="train",
            default_environment="math",
            environments=ENVIRONMENTS,
            on_bad_row=on_bad_row,
            limit=limit,
        )

    return run


def asked(task):
    return task.prompt[-1].content


def known(task):
    return task.metadata.get("ground_truth")


def shown(report):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.render())
    return console.export_text()


@pytest.mark.parametrize(
    ("row", "config", "question", "answer"),
    [
        ({"input": "1+1?", "output": "2"}, {}, "1+1?", "2"),
        ({"question": "1+1?", "answer": 2.0}, {}, "1+1?", "2"),
        ({"problem": "1/2?", "expected_answer": 0.5}, {}, "1/2?", "0.5"),
        ({"prompt": "1+1?", "ground_truth": " 2 "}, {}, "1+1?", "2"),
        ({"ask": "1+1?", "answer": "2"}, {"input_key": "ask"}, "1+1?", "2"),
        ({"question": "1+1?", "answer": "3", "fixed": "2"}, {"output_key": "fixed"}, "1+1?", "2"),
        (
            {"question": "Cost?", "answer": "It costs 1,000.\n#### 1,234"},
            {"dataset_name": "GSM8K"},
            "Cost?",
            "1234",
        ),
        ({"question": "Cost?", "answer": "It costs 1.\n#### 1"}, {}, "Cost?", "1"),
        (
            {"prompt": [user("1+1?")], "reward_model": {"ground_truth": "2", "style": "rule"}},
            {"dataset_name": "DAPOMath17K"},
            "1+1?",
            "2",
        ),
        (
            {"problem": "1+1?", "expected_answer": "2", "generated_solution": "..."},
            {"dataset_name": "OpenMathInstruct-2", "processor": "math_hf_data_processor"},
            "1+1?",
            "2",
        ),
    ],
)
def test_forms_of_rows(load, row, config, question, answer):
    (task,), _ = load([row], **config)
    assert task.prompt == (Message("user", question),)
    assert task.metadata == {"ground_truth": answer}
    assert (task.environment, task.source, task.id) == (
        "math",
        "rows.jsonl:1",
        "train:rows.jsonl:1",
    )


def test_columns_that_reward_functions_are_given_become_metadata(load):
    row = {"input": "1+1?", "output": "2", "data_source": "sums", "extra_info": {"level": 3}}
    (task,), _ = load([row])
    assert task.metadata == {"ground_truth": "2", "data_source": "sums", "extra_info": {"level": 3}}
    (task,), _ = load([row | {"data_source": None, "extra_info": "none"}])
    assert task.metadata == {"ground_truth": "2"}


def test_messages_are_taken_as_they_are(load):
    said = [system("Be brief."), user("1+1?"), assistant("2"), user("Twice that?"), assistant("4")]
    (task,), _ = load([{"messages": said, "question": "not this"}])
    assert task.prompt == tuple(Message(**turn) for turn in said[:-1])
    assert known(task) == "4"
    (task,), _ = load([{"messages": said[:2]}], env_name="reward_model")
    assert task.prompt[-1] == Message("user", "1+1?")
    assert task.metadata == {}


def test_preferences_give_their_prompts(load):
    row = {"prompt": "Hello", "chosen": "Good day.", "rejected": "What?"}
    (task,), report = load([row], env_name="reward_model")
    assert task.prompt == (Message("user", "Hello"),)
    assert known(task) == "Good day."
    assert "prompts of rows of" in report.notes[0]


def test_rows_that_ask_nothing_or_cannot_be_checked_are_counted(load):
    rows = [
        {"problem": "1+1?", "answer": "2"},
        {"problem": "Show it.", "answer": "proof"},
        {"problem": "Find it.", "answer": "notfound"},
        {"problem": "  ", "answer": "2"},
    ]
    tasks, report = load(rows, dataset_name="NuminaMath-1.5")
    assert len(tasks) == 1
    assert (report.num_read, report.num_kept) == (4, 1)
    assert report.dropped["no answer"].count == 2
    assert dict(report.dropped["no answer"].kinds) == {
        "the answer is proof": 1,
        "the answer is notfound": 1,
    }
    assert report.dropped["empty"].examples == ["rows.jsonl:4"]
    text = shown(report)
    assert "no answer" in text
    assert "1 x the answer is proof  (line 2)" in text
    assert "1 x the answer is notfound  (line 3)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_repeats_get_ids_of_their_own(load):
    rows = [{"problem": str(n), "answer": str(n)} for n in range(3)]
    tasks, report = load(rows, dataset_name="AIME2024", max_samples=2)
    assert len(tasks) == 2 * 16
    assert len({task.id for task in tasks}) == 32
    assert [asked(task) for task in tasks[:4]] == ["0", "1", "0", "1"]
    assert (report.num_kept, report.num_items, report.num_prompts) == (2, 32, 2)
    tasks, _ = load(rows, dataset_name="AIME2024", repeat=1)
    assert len(tasks) == 3


OPTIONS = {"A": "one", "B": "two", "C": "three"}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "options": OPTIONS, "answer": "B"},
        {"question": "1+1?", "options": ["one", "two", "three"], "answer": "B"},
        {"question": "1+1?", "choices": ["one", "two", "three"], "answer": "1"},
        {"question": "1+1?", "choices": ["one", "two", "three"], "answer": 1},
        {"question": "1+1?", "choices": ["one", "two", "three"], "answer": "two"},
        {
            "question": "1+1?",
            "choices": {"label": ["A", "B", "C"], "text": ["one", "two", "three"]},
            "answer": "B",
        },
        {"question": "1+1?", **OPTIONS, "answer": "B"},
    ],
)
def test_choices_stand_under_the_question(load, row):
    (task,), _ = load([row], processor="multichoice_qa_processor")
    assert asked(task) == "1+1?\nA) one\nB) two\nC) three"
    assert known(task) == "B"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "?", "options": ["one", "two"], "answer": "E"}, "neither one of A, B"),
        ({"question": "?", "options": ["one"], "answer": "A"}, "1 options"),
        ({"question": "?", "answer": "A"}, "0 options"),
        ({"question": "?", "options": "one", "answer": "A"}, "a string where a list"),
    ],
)
def test_choices_that_cannot_be_read(load, row, said):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{said}"):
        load([row], processor="multichoice_qa_processor")


@pytest.mark.parametrize("name", ["cot", "math", "gpqa", "mmlu", "mmlu_pro"])
def test_our_prompt_files_have_one_place_for_the_question(name):
    frame = read_prompt_frame(str(PROMPTS / f"{name}.txt"), None)
    (turn,) = frame.around((Message("user", "What is {x}?"),))
    assert turn.content.count("What is {x}?") == 1
    assert ("\\boxed{}" in turn.content) == (name in ("cot", "math"))
    assert ("Answer: X" in turn.content) == (name not in ("cot", "math"))


def test_a_mixture_keeps_what_each_set_says(write_rows):
    sums = write_rows([{"question": "1+1?", "answer": "2"}] * 2, "sums.jsonl")
    talk = write_rows([{"prompt": "Hello"}], "talk.jsonl")
    tasks, report = load_tasks(
        [
            TaskSetConfig(data_path=str(sums), task_name="sums"),
            TaskSetConfig(data_path=str(talk), env_name="reward_model"),
        ],
        name="train",
        default_environment="math",
        environments=ENVIRONMENTS,
    )
    assert [(task.environment, task.name) for task in tasks] == [
        ("math", "sums"),
        ("math", "sums"),
        ("reward_model", f"{talk.parent.name}-talk"),
    ]
    assert len({task.id for task in tasks}) == 3
    assert (report.num_read, report.num_items, report.num_prompts) == (3, 3, 2)
    assert report.sets["sums (math)"] == 2
    assert "sums (math)" in shown(report)
    report.set_lengths([7, 7, 9])
    told = report.to_dict()
    assert (told["num_tasks"], told["lengths"]["tokens"]["max"]) == (3, 9)


def test_a_limit_counts_rows_over_all_sets(write_rows):
    sets = [
        TaskSetConfig(
            data_path=str(
                write_rows([{"question": str(n), "answer": "1"} for n in range(3)], name)
            ),
            repeat=2,
        )
        for name in ("a.jsonl", "b.jsonl", "c.jsonl")
    ]
    tasks, report = load_tasks(
        sets, name="train", default_environment="math", environments=ENVIRONMENTS, limit=4
    )
    assert len(tasks) == 8
    assert report.num_kept == 4


def test_an_unknown_environment_is_named_with_the_nearest(load):
    with pytest.raises(
        ConfigError, match=r"env_name=maths.*Did you mean math\? There are: math, r"
    ):
        load([{"question": "1+1?", "answer": "2"}], env_name="maths")


def test_an_answer_that_is_needed_and_missing_names_row_and_column(load):
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": None}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row has no answer in 'answer'.*'math'"):
        load(rows)
    tasks, report = load(rows, on_bad_row="skip")
    assert len(tasks) == 1
    assert dict(report.dropped["malformed"].kinds) == {"no answer in 'answer'": 1}
    tasks, _ = load(rows, env_name="reward_model")
    assert [known(task) for task in tasks] == ["2", None]
    with pytest.raises(DataError, match=r"no answer in 'output'.*data.output_key"):
        load([{"prompt": "Hello"}])


@pytest.mark.parametrize(
    ("row", "config", "said"),
    [
        ({"text": "1+1?"}, {}, "no 'input', and none of prompt, question.*text"),
        ({"question": "1+1?"}, {"input_key": "questio"}, r"data.input_key .*\('question'\?\)"),
        ({"question": "?", "answer": "2"}, {"dataset_name": "GSM8K"}, "no '####'"),
        ({"question": "?", "answer": [2]}, {}, "'answer' is a list"),
        ({"question": "?", "answer": True}, {}, "'answer' is true or false"),
        ({"problem": "?"}, {"dataset_name": "GSM8K"}, "no 'answer'"),
        ([1, 2], {}, "the row is a list|a list where"),
    ],
)
def test_rows_that_cannot_be_read_name_their_line(load, row, config, said):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*({said})"):
        load([row], **config)


def test_names_that_are_unknown(load):
    with pytest.raises(DataError, match="Did you mean GSM8K"):
        load(None, dataset_name="gsm8")
    with pytest.raises(ConfigError, match="Did you mean math_data_processor"):
        load([{"question": "?", "answer": "1"}], processor="math_data_procesor")
    with pytest.raises(DataError, match="no path is given for ResponseDataset"):
        load(None, dataset_name="ResponseDataset")


MODULE = """
from laurel.data.sources import UnusableRow
from laurel.data.task_formats import TaskParts
from laurel.types import Message

class Sums:
    def __init__(self, data_path=None):
        rows = [{"problem": f"{n}+1?", "expected_answer": n + 1} for n in range(4)]
        self.formatted_ds = {"train": rows, "validation": rows[:1]}

def process(row, config):
    if row["n"] < 0:
        raise UnusableRow("below zero", "n is below zero")
    return TaskParts(prompt=(Message("user", str(row["n"])),), answer=str(row["n"] * 2),
                     metadata={"tests": [1]})

def broken(row, config):
    return row["n"]

def raising(row, config):
    raise RuntimeError("out of order")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module with classes and processors of the user's own."""
    (tmp_path / "own_tasks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_tasks"
    sys.modules.pop("own_tasks", None)


def test_a_class_of_ones_own(load, own):
    tasks, report = load(None, dataset_name=f"{own}.Sums")
    assert [(asked(task), known(task)) for task in tasks][:2] == [("0+1?", "1"), ("1+1?", "2")]
    assert tasks[0].source == f"{own}.Sums[0]"
    assert tasks[0].name == "Sums"
    assert report.num_kept == 4
    config = TaskSetConfig(dataset_name=f"{own}.Sums")
    assert own_validation_tasks(config) == config.model_copy(update={"split": "validation"})


def test_a_processor_of_ones_own(load, own):
    tasks, report = load([{"n": 4}, {"n": -1}], processor=f"{own}:process", on_bad_row="skip")
    assert [dict(task.metadata) for task in tasks] == [{"tests": [1], "ground_truth": "8"}]
    assert dict(report.dropped["malformed"].kinds) == {"below zero": 1}
    with pytest.raises(DataError, match=r"rows.jsonl:1: data.processor=.*returned a int"):
        load([{"n": 4}], processor=f"{own}.broken")
    with pytest.raises(DataError, match=r"raising raised RuntimeError: out of order"):
        load([{"n": 4}], processor=f"{own}.raising")


def test_the_whole_section(write_rows):
    rows = [{"question": f"{n}?", "answer": n} for n in range(40)]
    path = str(write_rows(rows))
    ask: Any = {"default_environment": "math", "environments": ENVIRONMENTS}

    held = load_task_data(TaskDataConfig(train_data_path=path), **ask)  # 5% of 40
    assert (len(held.train), len(held.validation)) == (38, 2)
    assert held.reports["train"].dropped["held out"].count == 2
    assert (held.reports["train"].num_items, held.reports["validation"].num_items) == (38, 2)

    none = load_task_data(TaskDataConfig(train_data_path=path, split_validation_size=0), **ask)
    assert (len(none.train), none.validation, list(none.reports)) == (40, [], ["train"])

    named = load_task_data(
        TaskDataConfig.model_validate(
            {"train": {"data_path": path}, "validation": [{"data_path": path, "max_samples": 3}]}
        ),
        **ask,
    )
    assert (len(named.train), len(named.validation)) == (40, 3)

    other = str(write_rows([{"question": f"{n}!", "answer": n} for n in range(20)], "b.jsonl"))
    blocks = [
        {"data_path": path, "split_validation_size": 0.5, "seed": 1},
        {"data_path": other, "split_validation_size": 0.0},
    ]
    mixed = load_task_data(TaskDataConfig.model_validate({"train": blocks}), **ask)
    assert len(mixed.validation) == 20
    assert all(asked(task).endswith("?") for task in mixed.validation)


def test_each_set_has_a_processor_and_an_environment_of_its_own(write_rows, own):
    choices = [{"question": "Which?", "options": ["one", "two"], "answer": "B"}]
    numbers = [{"n": 4}]
    blocks = [
        {"data_path": str(write_rows(choices)), "processor": "multichoice_qa_processor"},
        {
            "data_path": str(write_rows(numbers, "b.jsonl")),
            "processor": f"{own}:process",
            "env_name": "reward_model",
        },
        {"dataset_name": f"{own}.Sums", "processor": "math_hf_data_processor", "max_samples": 1},
    ]
    loaded = load_task_data(
        TaskDataConfig.model_validate({"train": blocks, "split_validation_size": 0}),
        default_environment="math",
        environments=ENVIRONMENTS,
    )
    assert [(task.environment, asked(task), known(task)) for task in loaded.train] == [
        ("math", "Which?\nA) one\nB) two", "B"),
        ("reward_model", "4", "8"),
        ("math", "0+1?", "1"),
    ]


def test_the_set_that_deepscaler_is_validated_on():
    found = own_validation_tasks(TaskSetConfig(dataset_name="DeepScaler", prompt_file="p.txt"))
    assert found is not None
    assert (found.dataset_name, found.prompt_file) == ("AIME2024", "p.txt")
    assert (
        own_validation_tasks(TaskSetConfig(dataset_name="DeepScaler", data_path="x.jsonl")) is None
    )
    assert own_validation_tasks(TaskSetConfig(dataset_name="GSM8K")) is None


@pytest.mark.parametrize(("default", "own"), [("maths", "math"), ("math", "maths")])
def test_a_misspelt_environment_is_named_before_a_file_is_read(default, own):
    """`data.env_name=maths` was taken in silence where each set named an environment."""
    sets = [TaskSetConfig(data_path="nowhere.jsonl", env_name=own)]
    with pytest.raises(ConfigError, match=r"=maths: there is no environment .* mean math\?"):
        load_tasks(sets, name="train", default_environment=default, environments=ENVIRONMENTS)

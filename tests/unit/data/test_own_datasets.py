import sys

import pytest

from laurel.config.data import DatasetConfig
from laurel.data.preferences import own_validation_preferences
from laurel.errors import DataError

MODULE = '''
from collections import Counter, OrderedDict

class TaskDataSpec:
    def __init__(self, task_name, prompt_file=None, system_prompt_file=None):
        self.task_name = task_name
        self.prompt_file = prompt_file
        self.system_prompt_file = system_prompt_file

def row(prompt):
    said = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    return {"context": [{"role": "user", "content": prompt}],
            "completions": [{"rank": rank, "completion": c} for rank, c in enumerate(said)]}

class BySplit:
    """The form that NeMo RL's users write."""
    def __init__(self):
        self.formatted_ds = {"train": [row("t1"), row("t2")], "validation": [row("v")],
                             "test": None}
        self.task_spec = TaskDataSpec("my-task")

class Rows:
    def __init__(self, data_path, split=None):
        self.formatted_ds = [row(data_path + "/" + str(split))]

class Framed:
    def __init__(self, directory="DIRECTORY"):
        self.formatted_ds = [row("q")]
        self.task_spec = TaskDataSpec("framed", prompt_file=directory + "/p.txt")

def generate(**options):
    for name in sorted(options):
        yield row(name)

def breaks():
    yield row("fine")
    raise KeyError("lost")

def number():
    return 7

class Fails:
    def __init__(self):
        raise RuntimeError("no such server")

class Empty:
    pass

constant = 3
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module in the working directory, as a user would have it."""
    (tmp_path / "my_rows.py").write_text(MODULE.replace("DIRECTORY", str(tmp_path)))
    (tmp_path / "my_broken.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "my_syntax.py").write_text("def (:\n")
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    for name in ("my_rows", "my_broken", "my_syntax"):
        sys.modules.pop(name, None)


def prompts(preferences):
    return [preference.group.prompt[-1].content for preference in preferences]


@pytest.mark.parametrize("name", ["my_rows.BySplit", "my_rows:BySplit"])
def test_a_class_with_its_rows_by_split(load, name):
    preferences, report = load(None, dataset_name=name)
    assert prompts(preferences) == ["t1", "t2"]
    assert preferences[1].source == f"{name}[1]"
    assert report.dataset_class == f"{name} (rows of PreferenceDataset)"
    assert report.origin == "my-task"
    validation, _ = load(None, dataset_name=name, split="validation")
    assert prompts(validation) == ["v"]
    with pytest.raises(DataError, match="has no split 'test'; it has: train, validation"):
        load(None, dataset_name=name, split="test")


def test_its_own_validation_split_is_found():
    config = DatasetConfig(dataset_name="my_rows.BySplit")
    found = own_validation_preferences(config)
    assert found is not None
    assert found.split == "validation"
    assert own_validation_preferences(DatasetConfig(dataset_name="my_rows.generate")) is None


def test_set_values_are_passed_where_they_are_accepted(load):
    preferences, report = load(
        None, dataset_name="my_rows.Rows", data_path="here", split="dev", subset="x"
    )
    assert prompts(preferences) == ["here/dev"]
    assert report.notes == ["my_rows.Rows takes no subset, so data.subset has no effect"]
    everything, _ = load(None, dataset_name="my_rows.generate", data_path="here", subset="x")
    assert prompts(everything) == ["data_path", "subset"]


def test_the_prompt_files_of_a_task_are_used(load, tmp_path):
    (tmp_path / "p.txt").write_text("from the task: {}")
    (tmp_path / "mine.txt").write_text("from the configuration: {}")
    preferences, _ = load(None, dataset_name="my_rows.Framed")
    assert prompts(preferences) == ["from the task: q"]
    preferences, _ = load(None, dataset_name="my_rows.Framed", prompt_file="mine.txt")
    assert prompts(preferences) == ["from the configuration: q"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("my_rows.Rows", r"calling it with \(\) raised TypeError: .*data_path"),
        ("my_rows.Fails", "raised RuntimeError: no such server"),
        ("my_rows.breaks", "raised KeyError after 1 row: 'lost'"),
        ("my_rows.number", "gives a int where rows are expected"),
        ("my_rows.Empty", "gives a Empty where rows are expected"),
        ("my_rows.constant", "is a int; it must be a class"),
        ("my_rows.BySplits", "my_rows has no 'BySplits'; did you mean 'BySplit'"),
        ("my_row.BySplit", "there is no module 'my_row' in the working directory"),
        (
            "my_broken.Rows",
            r"'a_package_nobody_has' \(my_broken.py:1\); install what it imports",
        ),
        ("my_syntax.Rows", "module 'my_syntax' cannot be imported: SyntaxError"),
        ("my_rows:", "'my_rows:' is not of the form module.Name or module:Name"),
        (":Rows", "':Rows' is not of the form"),
        ("my_rows.xyz", "my_rows has no 'xyz'; it has: TaskDataSpec, row, BySplit, Rows"),
    ],
)
def test_what_cannot_be_used_is_named(load, name, part):
    with pytest.raises(DataError, match=part):
        load(None, dataset_name=name)

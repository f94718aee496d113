import sys

import pytest

from laurel.config.data import DatasetConfig, TaskDataConfig
from laurel.config.load import load_config
from laurel.config.sft import DemonstrationDataConfig, SFTRun
from laurel.data.conversations import load_demonstration_data
from laurel.data.preferences import own_validation_preferences
from laurel.data.tasks import load_task_data
from laurel.errors import ConfigError, DataError

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

class Response:
    """The form of NeMo RL's users since 2026."""
    def __init__(self, data_path="none", split_validation_size=0.0, seed=42, **kwargs):
        self.task_name = "sums"
        number = int(10 * split_validation_size)
        self.dataset = [self.row(f"{data_path}{n}", kwargs) for n in range(10 - number)]
        self.val_dataset = None
        if "own" in data_path:
            self.val_dataset = [self.row(f"held{n}", kwargs) for n in range(2)]

    def row(self, name, kwargs):
        said = [("user", f"{name} {sorted(kwargs)}"), ("assistant", "7")]
        return {"messages": [dict(zip(("role", "content"), one)) for one in said],
                "task_name": self.task_name}

    def set_task_spec(self, data_config):
        assert data_config["dataset_name"].endswith("Response")
        self.task_spec = TaskDataSpec(self.task_name, data_config.get("prompt_file"))

    def set_processor(self):
        raise RuntimeError("of NeMo RL, which is not here")

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

class Filtered:
    """Rows that are made of others."""
    def __init__(self):
        self.dataset = [row("all"), row("kept")]

    def __iter__(self):
        return iter(self.dataset[1:])

class Part:
    """Like torch's Subset, whose `dataset` is what it is a part of."""
    def __init__(self):
        self.dataset = [row("all"), row("kept")]

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.dataset[1:][index]

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


def test_what_has_items_is_the_rows_itself(load):
    preferences, _ = load(None, dataset_name="my_rows.Filtered")
    assert prompts(preferences) == ["kept"]
    with pytest.raises(DataError, match="a Part where rows are expected"):
        load(None, dataset_name="my_rows.Part")


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
        ("my_rows.xyz", "my_rows has no 'xyz'; it has: TaskDataSpec, row, BySplit, Response"),
    ],
)
def test_what_cannot_be_used_is_named(load, name, part):
    with pytest.raises(DataError, match=part):
        load(None, dataset_name=name)


def test_a_class_of_nemo_rl_of_2026_for_both_commands(tmp_path):
    (tmp_path / "p.txt").write_text("say: {}")
    said = {"dataset_name": "my_rows.Response", "data_path": "q", "prompt_file": "p.txt"}
    share = {"split_validation_size": 0.2}
    sft = load_demonstration_data(DemonstrationDataConfig.model_validate({"train": said | share}))
    assert (len(sft.train), len(sft.validation)) == (8, 2)  # held out once, by Laurel
    assert sft.train[0].messages[0].content.startswith("say: q")
    assert sft.train[0].name == "sums"
    processor = {"processor": "math_hf_data_processor", "env_name": "math"}
    data = TaskDataConfig.model_validate({"train": [said | share | processor]})
    grpo = load_task_data(data, default_environment="code", environments=["math", "code"])
    assert (len(grpo.train), len(grpo.validation)) == (8, 2)
    task = grpo.train[0]
    assert (task.metadata["ground_truth"], task.environment, task.name) == ("7", "math", "sums")
    assert "say: q" in task.prompt[-1].content


def test_what_such_a_class_holds_out_itself_is_validation():
    said = {"dataset_name": "my_rows.Response", "data_path": "own"}
    data = DemonstrationDataConfig.model_validate({"train": said})
    sft = load_demonstration_data(data)
    assert (len(sft.train), len(sft.validation)) == (10, 2)
    assert sft.validation[0].messages[0].content == "held0 []"
    grpo = load_task_data(
        TaskDataConfig.model_validate({"train": said}),
        default_environment="math",
        environments=["math", "code"],
    )
    assert (len(grpo.train), len(grpo.validation)) == (10, 2)


def test_keys_of_ones_own_in_its_block_are_keywords(tmp_path):
    file = tmp_path / "run.yaml"
    block = "dataset_name: my_rows.Response, input_key: q"
    file.write_text(f"data: {{train: [{{{block}, difficulty: hard, kwargs: {{more: 1}}}}]}}")
    data = load_config(SFTRun, file).config.data
    assert data.train[0].kwargs == {"difficulty": "hard", "more": 1}
    asked = load_demonstration_data(data).train[0].messages[0].content
    assert asked.endswith("['difficulty', 'input_key', 'more']")
    file.write_text(f"data: {{train: {{{block}, max_sampels: 3}}}}")
    with pytest.raises(ConfigError, match="max_samples"):
        load_config(SFTRun, file)
    said = {"train": {"kwargs": {"difficulty": 1}, "dataset_name": "squad"}}
    with pytest.raises(DataError, match=r"kwargs \(difficulty\) are for a class of your own"):
        load_demonstration_data(DemonstrationDataConfig.model_validate(said))

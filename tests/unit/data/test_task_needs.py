"""Rows that their environment could not judge: refused, never a 0 for everything."""

import pytest

from chat_rows import assistant, user
from laurel.config.data import TaskDataConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.data.sources import UnusableRow
from laurel.data.task_formats import TaskParts
from laurel.data.tasks import NOT_WHAT_IS_RIGHT, NeedsCheck, TaskNeeds, load_task_data
from laurel.errors import ConfigError, DataError
from laurel.run.tasks import needs_of

ENVIRONMENTS = ("math", "code", "reward_model", "mine")
PAIR = {"prompt": "Say something.", "chosen": "Here are 7 birds.", "rejected": "No."}
RANKED = {
    "context": [user("Say something.")],
    "completions": [{"rank": i, "completion": [assistant(f"{i}")]} for i in (0, 1)],
}
STORY = "Once there were 3 bears, and " + "they walked on and on through the wood " * 3


@pytest.fixture
def load(write_rows):
    def run(rows, *, environment="math", **data):
        path = str(write_rows(rows))
        given = TaskDataConfig(train_data_path=path, split_validation_size=0, **data)
        return load_task_data(
            given,
            default_environment=environment,
            environments=ENVIRONMENTS,
            needs=TaskNeeds(tests=frozenset({"code"})),
        )

    return run


@pytest.mark.parametrize("row", [PAIR, RANKED])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_preferences_are_not_graded_by_who_was_never_named(load, row, on_bad_row):
    named = r"rows\.jsonl: rows of \w*PreferenceDataset say which answer people prefer.*math"
    what_to_do = r"data\.env_name=reward_model.*env\.custom.*data\.env_name=math.*laurel rm"
    with pytest.raises(ConfigError, match=named + ".*" + what_to_do):
        load([row], on_bad_row=on_bad_row)
    # The same where the class is said, before a row is read.
    with pytest.raises(ConfigError, match=named):
        load(
            [row],
            dataset_name="PreferenceDataset" if "context" in row else "BinaryPreferenceDataset",
        )


def test_preferences_are_graded_by_whom_the_configuration_names(load):
    said = NOT_WHAT_IS_RIGHT
    loaded = load([PAIR], env_name="math")
    assert [task.environment for task in loaded.train] == ["math"]
    assert said in loaded.reports["train"].notes
    for environment in ("reward_model", "mine"):
        loaded = load([PAIR], env_name=environment)
        assert [task.environment for task in loaded.train] == [environment]
        assert said not in loaded.reports["train"].notes
    # env.reward_model.enabled speaks for it, too.
    assert load([PAIR], environment="reward_model").train[0].environment == "reward_model"


def test_answers_that_are_texts_are_not_checked_unless_that_is_said(load):
    texts = [{"input": f"Tell me {i}.", "output": STORY} for i in range(3)]
    with pytest.raises(ConfigError, match=r"3 of 4 known answers are texts of more than 20 words"):
        load([*texts, {"input": "1+1?", "output": "2"}])
    assert len(load(texts, env_name="math").train) == 3
    # Half of them, solutions with a marked end, and short sentences are answers.
    assert load([*texts, *({"input": f"{i}+1?", "output": "2"} for i in range(3))]).train
    assert load([{"input": "1+1?", "output": f"{STORY} \\boxed{{2}}"}]).train
    assert load([{"input": "1+1?", "output": "She has 2 of them."}]).train


def test_a_program_without_tests_is_a_malformed_row(load):
    plain = {"input": "Add 1.", "output": "x + 1"}
    tested = {"input": "Add 1.", "test_list": ["assert f(1) == 2"], "entry": "f"}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row brings no tests.*'code'.*MBPP"):
        load([plain], env_name="code")
    loaded = load([plain, tested], env_name="code", dataset_name="CodeTasks", on_bad_row="skip")
    assert len(loaded.train) == 1
    assert loaded.reports["train"].dropped["malformed"].count == 1
    with pytest.raises(DataError, match=r"no answer in .*or data\.env_name=code: the row brings"):
        load([tested], dataset_name="CodeTasks", env_name="math")


def test_tests_of_an_environment_of_a_package_are_looked_for():
    needs = TaskNeeds(tests=frozenset({"mine"}), keys_of_tests={"my_tests": "mine"})
    check = NeedsCheck(needs=needs, environment="mine", is_named=True)
    row = TaskParts(prompt=(user("Add."),))
    check.check_row(row, {"my_tests": ["t"]})
    with pytest.raises(UnusableRow, match=r"it looks for .*my_tests"):
        check.check_row(row, {"other": ["t"]})


def test_what_a_combination_needs_follows_from_its_parts():
    parts = {
        "judged": "[{env: code}, {env: reward_model}]",
        "measured": "[{env: code}, {env: math, weight: 0}]",
        "gated": "[{env: reward_model}, {env: code, gate: 0.5}]",
        "open": "[{env: reward_model}, {env: code, gate: 0}]",
        "nested": "[{env: measured}]",
    }
    changes = [f"+env.composite.{name}.parts={given}" for name, given in parts.items()]
    needs = needs_of(load_config(GRPORun, None, changes).config.env)
    assert needs.tests == {"code", "measured", "gated", "nested"}
    assert needs.answers == {"math", "math_default", "measured", "nested"}
    assert needs_of(GRPORun().env, "math_default").answers == {"math", "math_default"}
    referring = ["env.reward_model.transform.subtract_reference=true"]
    assert "reward_model" in needs_of(load_config(GRPORun, None, referring).config.env).answers

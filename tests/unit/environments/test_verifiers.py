"""Tasksets of verifiers, with the package itself: `make test-environments` installs it."""

import sys
import textwrap

import pytest

from laurel.config.data import TaskDataConfig, TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.data.tasks import load_task_data
from laurel.environments import verifiers
from laurel.environments.registry import create_environment, environment_names, row_sources
from laurel.errors import ConfigError, MissingDependencyError
from policy_runs import grpo, grpo_settings, metrics_of

TASKSET = """
import verifiers.v1 as vf


class VowelsData(vf.TaskData):
    answer: str


class VowelsTask(vf.Task[VowelsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise KeyError("no such thing")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))
MORE

class VowelsConfig(vf.TasksetConfig):
    num_tasks: int = 5


class VowelsTaskset(vf.Taskset[VowelsTask, VowelsConfig]):
    def load(self) -> list[VowelsTask]:
        return [
            VowelsTask(
                VowelsData(
                    prompt=f"How many vowels are in {'banana'[: i + 2]}?",
                    system_prompt="Count.",
                    answer=str(sum(c in "aeiou" for c in "banana"[: i + 2])),
                ),
                self.config.task,
            )
            for i in range(self.config.num_tasks)
        ]


__all__ = ["VowelsTaskset"]
"""
TOOLS = '''
    @classmethod
    def toolsets(cls, config):
        return [Echo(vf.ToolsetConfig())]


class Echo(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "echo"

    @vf.tool
    def echo(self, text: str) -> str:
        """Return the text."""
        return text
'''
RUNTIME = """
    @vf.reward(weight=1.0)
    async def by_a_file(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0
"""


def write_taskset(directory, name, more=""):
    (directory / f"{name}.py").write_text(textwrap.dedent(TASKSET).replace("MORE", more))


@pytest.fixture
def tasksets(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="make test-environments installs verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_taskset(tmp_path, "vowels_v1")
    write_taskset(tmp_path, "vowels_with_tools", TOOLS)
    write_taskset(tmp_path, "vowels_in_a_box", RUNTIME)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("vowels"):
            del sys.modules[name]


def config_of(**environments):
    return EnvironmentsConfig(verifiers=environments)


def load(config, **data):
    return load_task_data(
        TaskDataConfig(dataset_name="verifiers", split_validation_size=0, **data),
        default_environment="math",
        environments=environment_names(config),
        sources=row_sources(config),
    ).train


def asked(task, answer):
    log = [{"role": m.role, "content": m.content} for m in task.prompt]
    return [*log, {"role": "assistant", "content": answer}]


def test_tasks_become_tasks_and_weighted_rewards_components(tasksets):
    config = config_of(vowels={"id": "vowels-v1", "args": {"num_tasks": 4}})
    tasks = load(config, env_name="vowels")
    assert [m.content for m in tasks[0].prompt] == ["Count.", "How many vowels are in ba?"]
    assert [task.environment for task in tasks] == ["vowels"] * 4
    environment = create_environment("vowels", config)
    said = ["1", "surely it is 1", "0"]
    verdict = environment.step([asked(tasks[0], one) for one in said], [tasks[0].metadata] * 3)
    assert verdict.failures == [None] * 3
    assert verdict.rewards["right"].tolist() == [1.0, 1.0, 0.0]
    assert verdict.rewards["short"].tolist() == pytest.approx([0.2, 0.0, 0.2])
    assert verdict.notes == [{"length": 1.0}, {"length": 14.0}, {"length": 1.0}]


def test_a_reward_that_raises_is_a_failure_with_its_line(tasksets):
    config = config_of(vowels={"id": "vowels-v1"})
    task = load(config, env_name="vowels")[0]
    environment = create_environment("vowels", config)
    verdict = environment.step(
        [asked(task, "break"), asked(task, "1"), asked(task, "1")],
        [task.metadata, task.metadata, None],
    )
    assert "KeyError: 'no such thing'" in verdict.failures[0]
    assert "vowels_v1.py:" in verdict.failures[0]
    assert verdict.failures[1] is None
    assert "not of env.verifiers.vowels" in verdict.failures[2]


def test_its_figures(tasksets):
    config = config_of(vowels={"id": "vowels-v1"})
    environment = create_environment("vowels", config)
    batch = {
        "group_ids": ["a", "a", "a"],
        "is_end": [1.0, 1.0, 0.0],
        "generation_lengths": [3.0, 5.0, 5.0],
        "prompt_lengths": [7.0, 7.0, 7.0],
        # Behind tools, a rollout may run out of turns before it is scored.
        "notes": [{"length": 2.0}, {"length": 4.0}, None],
    }
    assert environment.global_post_process_and_metrics(batch)[1]["metric/length"] == 3.0


@pytest.mark.parametrize(
    ("environment", "data", "said"),
    [
        ({"id": "nothing-here"}, {}, "nothing-here"),
        ({"id": "vowels-v1", "args": {"tasks": 3}}, {}, "tasks"),
        ({"id": "vowels-with-tools"}, {}, "needs tool servers"),
        ({"id": "vowels-in-a-box"}, {}, "needs a runtime for its 'by_a_file'"),
        ({"id": "vowels-v1"}, {"env_name": "math"}, "is no environment of env.verifiers"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_run(tasksets, environment, data, said):
    with pytest.raises(ConfigError, match=said):
        load(config_of(vowels=environment), **{"env_name": "vowels", **data})


def test_a_run_learns_from_its_rewards(tasksets, tmp_path):
    settings = [one for one in grpo_settings(tmp_path, None) if not one.startswith("data.")]
    grpo(
        [
            *settings,
            "data.dataset_name=verifiers",
            "data.env_name=vowels",
            "data.split_validation_size=0.4",
            "env.verifiers={vowels: {id: vowels-v1, args: {num_tasks: 40}}}",
            "grpo.max_num_steps=2",
        ]
    )
    names = {name for figures in metrics_of(tmp_path).values() for name in figures}
    assert {"train/rewards/right/mean", "env/vowels/metric/length"} <= names, " ".join(
        sorted(names)
    )


def test_names_are_given_once():
    twice = EnvironmentsConfig(
        verifiers={"mine": {"id": "x"}}, custom={"mine": {"name": "a.B", "kwargs": {}}}
    )
    with pytest.raises(ConfigError, match=r"env\.custom and env\.verifiers both have mine"):
        create_environment("mine", twice)
    with pytest.raises(ConfigError, match="is an environment of Laurel"):
        create_environment("math", config_of(math={"id": "x"}))


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, None)
    config = config_of(vowels={"id": "vowels-v1"})
    with pytest.raises(MissingDependencyError, match="verifiers"):
        verifiers.taskset_rows(
            TaskSetConfig(dataset_name="verifiers", env_name="vowels"), config.verifiers
        )

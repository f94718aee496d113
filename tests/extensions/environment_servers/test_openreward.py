"""A server of the Open Reward Standard in a process of its own: `make test-openreward`."""

import re
import sys
from collections import Counter

import pytest

from laurel.config.data import TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.environments.registry import (
    create_environment,
    row_sources,
    shown_tools,
)
from laurel.errors import (
    ConfigError,
    EnvironmentFailedError,
    MissingDependencyError,
    ModelError,
    WorkerError,
)
from laurel.models.tokenizer import CHATML
from laurel.models.tool_calls import HermesForm, ToolCall
from policy_runs import task_data
from sandbox_processes import wait_until
from session_servers import ServerProcess
from tool_templates import TOKENIZERS, chatml_like


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    pytest.importorskip("openreward", reason="make test-openreward installs openreward")
    with ServerProcess("openreward_server.py", tmp_path_factory.mktemp("server")) as server:
        yield server


def config_of(server, *, seconds=200.0, **settings):
    given = {"url": server.url, **settings}
    return EnvironmentsConfig(openreward={"sums": given}, timeout_seconds=seconds)


def opened(config):
    environment = create_environment("sums", config)
    environment.use_tokenizer(TOKENIZERS["hermes"]())
    return environment


def load(config, **data):
    data = {"dataset_name": "openreward", "env_name": "sums", "split_validation_size": 0, **data}
    return task_data(config, **data).train


class Conversation:
    def __init__(self, environment, task, name):
        self.environment = environment
        self.log = [{"role": m.role, "content": m.content} for m in task.prompt]
        self.metadata = {**task.metadata, "laurel_conversation_id": name}

    def say(self, text):
        self.log.append({"role": "assistant", "content": text})
        verdict = self.environment.step([self.log], [self.metadata])
        if isinstance(verdict.observations[0], list):
            self.log += verdict.observations[0]
        return verdict

    def call(self, *calls):
        written = [ToolCall(name, arguments) for name, arguments in calls]
        return self.say(HermesForm().write(written))


def test_tasks_of_a_split_are_played_by_calls_of_tools(server):
    config = config_of(server)
    tasks = load(config, max_samples=3)
    assert [m.content for m in tasks[2].prompt] == ["What is 2 + 3?"]
    assert len(tasks) == 3
    assert len(load(config, split="test")) == 2
    with opened(config) as environment:
        shown = {tool["function"]["name"]: tool["function"] for tool in environment.spec.tools}
        assert set(shown) == {"add", "submit", "boom"}
        assert shown["add"]["description"] == "Add two numbers."
        assert set(shown["add"]["parameters"]["properties"]) == {"a", "b"}
        talk = Conversation(environment, tasks[2], "x")
        first = talk.call(("add", {"a": 2, "b": 3}), ("add", {"a": 1, "b": 1}))
        assert first.failures == [None]
        assert first.observations == [
            [{"role": "tool", "content": "5"}, {"role": "tool", "content": "2"}]
        ]
        assert (first.rewards.tolist(), first.terminateds.tolist()) == ([0.5], [False])
        last = talk.call(("submit", {"answer": 5}), ("add", {"a": 1, "b": 1}))
        assert (last.rewards.tolist(), last.terminateds.tolist()) == ([1.0], [True])
        assert last.notes == [{"turns": 2.0, "refused": 0.0, "ended": 1.0}]
    (shown,) = shown_tools("sums", config)
    assert shown == ("env.openreward.sums", environment.spec.tools)


@pytest.mark.parametrize("most", [1, 8])
def test_rows_are_read_with_sessions_that_are_few_or_lost(tmp_path, shared, most):
    with ServerProcess("openreward_server.py", tmp_path, str(most)) as server:
        tasks = load(config_of(server))
        assert [task.prompt[-1].content for task in tasks] == [
            f"What is {n} + {n + 1}?" for n in range(14)
        ]
        wait_until(lambda: len(set(server.counts())) == 1)
        read = Counter(re.findall(r"read (\d+)", server.log.read_text()))
    assert (read["4"], read["12"]) == (4, 2)
    if most == 8:  # those before an outage are kept
        assert [read[str(n)] for n in range(14)] == [1] * 4 + [4, 2, 2, 2] + [1] * 4 + [2] * 2


def test_calls_that_the_server_does_not_take_are_answered(server):
    config = config_of(server)
    task = load(config, max_samples=1)[0]
    with opened(config) as environment:
        talk = Conversation(environment, task, "x")
        wrong = talk.call(("add", {"a": "two"}), ("multiply", {"a": 1}))
        texts = [one["content"] for one in wrong.observations[0]]
        assert all(text.startswith("Error: ") for text in texts), texts
        assert "multiply" in texts[1]
        malformed = talk.say('<tool_call>{"name": </tool_call>')
        assert "cannot be read" in malformed.observations[0][0]["content"]
        assert malformed.notes == [{"turns": 2.0, "refused": 3.0, "ended": 0.0}]
        silent = talk.say("It is 1.")
        assert (silent.rewards.tolist(), silent.terminateds.tolist()) == ([0.0], [True])


def test_calls_and_answers_that_cannot_be_sent_are_no_failures(server):
    config = config_of(server)
    task = load(config, max_samples=1)[0]
    with opened(config) as environment:
        talk = Conversation(environment, task, "x")
        for one in ('"\\ud800"', "[" * 900 + "]" * 900, "1e999"):
            written = '{"name": "add", "arguments": {"b": 2, "a": ' + one + "}}"
            verdict = talk.say(f"<tool_call>{written}</tool_call>")
            assert verdict.failures == [None]
            assert verdict.observations[0][0]["content"].startswith("Error: ")
        assert verdict.notes == [{"turns": 3.0, "refused": 3.0, "ended": 0.0}]
    config = config_of(server, environment="words")
    task = load(config, max_samples=1)[0]
    with opened(config) as environment:
        talk = Conversation(environment, task, "y")
        long = talk.say("yes, I do")
        assert (long.failures, long.terminateds.tolist()) == ([None], [False])
        assert long.observations[0][0]["content"].startswith("Error: ")
        last = talk.say("yes")
        assert (last.rewards.tolist(), last.terminateds.tolist()) == ([1.0], [True])


def test_a_task_with_tools_of_its_own_is_refused(server):
    config = config_of(server, environment="own")
    assert len(load(config, max_samples=1)) == 1
    with pytest.raises(EnvironmentFailedError, match="the task has tools of its own"):
        load(config, max_samples=2)


def test_calls_whose_form_is_not_known_are_failures_and_no_answers(server):
    config = config_of(server)
    task = load(config, max_samples=1)[0]
    with create_environment("sums", config) as environment:
        unread = Conversation(environment, task, "x").call(("submit", {"answer": 1}))
        assert "env.openreward.sums: how the policy writes calls depends on" in unread.failures[0]
        environment.use_tokenizer(TOKENIZERS["hermes"]())
        read = Conversation(environment, task, "y").call(("submit", {"answer": 1}))
        assert (read.failures, read.rewards.tolist()) == ([None], [1.0])


def test_a_template_that_leaves_tools_out_names_their_section(server):
    said = r"leaves out the tools of env\.openreward\.sums"
    environment = create_environment("sums", config_of(server))
    with environment, pytest.raises(ModelError, match=said):
        environment.use_tokenizer(chatml_like(CHATML))


def test_a_tool_that_raises_is_a_failure(server):
    config = config_of(server)
    task = load(config, max_samples=1)[0]
    with opened(config) as environment:
        verdict = Conversation(environment, task, "x").call(("boom", {"answer": 1}))
        assert "the abacus broke" in verdict.failures[0]


def test_a_server_that_comes_back_goes_on_with_its_sessions(tmp_path, shared):
    with ServerProcess("openreward_server.py", tmp_path) as server:
        config = config_of(server)
        task = load(config, max_samples=3)[2]
        with opened(config) as environment:
            talk = Conversation(environment, task, "x")
            talk.call(("add", {"a": 2, "b": 3}))
            begun = server.counts()[0]
            server.kill()
            server.start()
            last = talk.call(("submit", {"answer": 5}))
            assert (last.failures, last.rewards.tolist()) == ([None], [1.0])
            assert last.notes == [{"turns": 2.0, "refused": 0.0, "ended": 1.0}]
            assert server.counts()[0] == begun + 1


def test_a_server_that_dies_is_a_lost_worker(tmp_path, shared):
    with ServerProcess("openreward_server.py", tmp_path) as server:
        config = config_of(server, seconds=10.0)
        task = load(config, max_samples=1)[0]
        with opened(config) as environment:
            talk = Conversation(environment, task, "x")
            talk.call(("add", {"a": 2, "b": 3}))
            server.kill()
            with pytest.raises(WorkerError, match="has not answered for 1 s") as caught:
                talk.call(("add", {"a": 2, "b": 3}))
            assert caught.value.is_lost


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"environment": "nothing"}, "has no environment 'nothing'"),
        ({"api_key_env": "LAUREL_NO_SUCH_KEY"}, "LAUREL_NO_SUCH_KEY is not set"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_run(server, settings, said):
    with pytest.raises(ConfigError, match=said):
        load(config_of(server, seconds=1.0, **settings))


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openreward.api.environments.client", None)
    monkeypatch.setitem(sys.modules, "openreward", None)
    config = EnvironmentsConfig(openreward={"sums": {"url": "http://127.0.0.1:9"}})
    asked = TaskSetConfig(dataset_name="openreward", env_name="sums")
    with pytest.raises(MissingDependencyError, match="openreward"):
        row_sources(config)["openreward"](asked)

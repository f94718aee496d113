"""Tasksets of verifiers, with the package itself: `make test-environments` installs it."""

import asyncio
import json
import re
import sys
import textwrap
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from json_replies import JSONHandler
from laurel.config.data import TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.environments.interface import CONVERSATION_ID
from laurel.environments.registry import (
    create_environment,
    create_environments,
)
from laurel.errors import ConfigError, MissingDependencyError, WorkerError
from laurel.extensions.verifiers import environment as verifiers
from policy_runs import (
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
    sft,
    sft_settings,
    task_data,
)
from tool_templates import TOKENIZERS

# Of a package that the package's client of tool servers calls.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")

TASKSETS = Path(__file__).parents[2] / "tasksets"
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
RUNTIME = """
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("told.txt", self.data.answer.encode())

    @vf.reward(weight=1.0)
    async def by_a_file(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.read("told.txt")).decode() == trace.last_reply)
"""
CONTAINER = """
    NEEDS_CONTAINER = True
"""
OWN_PROGRAM = """

class Program(vf.Harness):
    async def launch(self, *args):
        raise NotImplementedError
"""


def write_taskset(directory, name, more=""):
    (directory / f"{name}.py").write_text(textwrap.dedent(TASKSET).replace("MORE", more))


@pytest.fixture
def tasksets(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="make test-environments installs verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_taskset(tmp_path, "vowels_v1")
    write_taskset(tmp_path, "vowels_of_a_file", RUNTIME)
    write_taskset(tmp_path, "vowels_in_a_box", CONTAINER)
    write_taskset(tmp_path, "vowels_by_a_program", OWN_PROGRAM)
    with (tmp_path / "vowels_by_a_program.py").open("a") as file:
        file.write('__all__ = ["VowelsTaskset", "Program"]\n')
    monkeypatch.syspath_prepend(str(TASKSETS))
    # Servers of tools are processes of their own.
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("vowels", "guess_v1", "adder_v1")):
            del sys.modules[name]


def config_of(**environments):
    return EnvironmentsConfig(verifiers=environments)


def load(config, **data):
    data = {"dataset_name": "verifiers", "split_validation_size": 0, **data}
    return task_data(config, **data).train


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
        ({"id": "vowels-in-a-box"}, {}, "needs a container"),
        ({"id": "vowels-by-a-program"}, {}, "runs the program 'vowels-by-a-program'"),
        ({"id": "vowels-v1", "env": {"agent": {"harness": {"id": "bash"}}}}, {}, "'bash'"),
        (
            {"id": "vowels-v1", "env": {"agent": {"runtime": {"type": "docker"}}}},
            {},
            r"needs a container \(docker\)",
        ),
        (
            {"id": "vowels-v1", "env": {"agent": {"max_output_tokens": 9}}},
            {},
            "max_output_tokens is policy.generation's",
        ),
        ({"id": "vowels-v1", "env": {"id": "user-sim"}}, {}, "assistant, user has no client"),
        ({"id": "vowels-v1", "env": {"agents": {}}}, {}, "agents"),
        ({"id": "guess-v1", "env": {"opening": "none"}}, {}, "cannot begin"),
        (
            {"id": "vowels-v1", "env": {"retries": {"max_retries": 2}}},
            {},
            "the environment has retries",
        ),
        (
            {"id": "vowels-v1", "env": {"agent": {"retries": {"rules": [{"max_retries": 1}]}}}},
            {},
            "the agent 'agent', the policy, has retries",
        ),
        ({"id": "vowels-v1"}, {"env_name": "math"}, "is no environment of env.verifiers"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_run(tasksets, environment, data, said):
    with pytest.raises(ConfigError, match=said):
        load(config_of(vowels=environment), **{"env_name": "vowels", **data})


@pytest.fixture
def play(tasksets):
    """Play one task of a taskset, turn by turn; what is open is closed at the end."""
    made = []

    def begin(index=0, *, max_turns=None, id="guess-v1", conversation="a", **settings):
        config = config_of(theirs={"id": id, **settings})
        task = load(config, env_name="theirs")[index]
        environment = create_environments(["theirs"], config, max_turns=max_turns)["theirs"]
        made.append(environment)
        if environment.spec.tools:
            environment.use_tokenizer(TOKENIZERS["hermes"]())
        return Played(environment, task, conversation)

    yield begin
    for environment in made:
        environment.shutdown()


class Played:
    def __init__(self, environment, task, conversation):
        self.environment = environment
        self.log = [{"role": m.role, "content": m.content} for m in task.prompt]
        self.metadata = {**task.metadata, CONVERSATION_ID: conversation}

    def say(self, text):
        """Take the policy's turn; return the observation, or the whole return at the end."""
        self.log.append({"role": "assistant", "content": text})
        returned = self.environment.step([self.log], [self.metadata])
        self.metadata = returned.metadata[0]
        if returned.terminateds[0]:
            return returned
        assert not isinstance(returned.rewards, dict)
        assert returned.rewards.tolist() == [0.0]
        self.log += returned.observations[0]
        return returned.observations[0]


def user(text):
    return [{"role": "user", "content": text}]


def test_a_user_that_is_a_program_opens_and_answers(play):
    game = play(3)
    asked = [{"role": "system", "content": "Play."}, *user("Guess my number.")]
    assert game.log == asked
    assert game.say("well") == user("A number, please.")
    assert game.say("is it 7 then") == user("Lower.")
    end = game.say("3")
    assert end.failures == [None]
    assert {name: values.tolist() for name, values in end.rewards.items()} == {"found": [0.5]}
    assert end.notes == [{"guesses": 3.0}]


def test_conversations_that_run_at_once_do_not_mix(play):
    one = play(2)
    config = one.environment
    other = play(1)
    other.environment = config
    other.metadata |= {CONVERSATION_ID: "b"}
    logs = [one.log, other.log]
    for log in logs:
        log.append({"role": "assistant", "content": "0 or 1"})
    returned = config.step(logs, [one.metadata, other.metadata])
    assert returned.observations[0] == user("Higher.")
    assert returned.terminateds.tolist() == [False, True]
    assert returned.rewards["found"].tolist() == [0.0, 0.5]


def test_an_episode_out_of_turns_is_scored_as_it_is(play):
    game = play(3, max_turns=2)
    game.say("1")
    end = game.say("2")
    assert end.failures == [None]
    assert end.rewards["found"].tolist() == [0.0]
    assert end.notes == [{"guesses": 2.0}]


@pytest.mark.parametrize("turns", [(1, 9), (9, 1)])
def test_the_lower_limit_of_turns_holds(play, turns):
    own, of_rollouts = turns
    game = play(3, max_turns=of_rollouts, env={"player": {"max_turns": own}})
    assert game.say("1").notes == [{"guesses": 1.0}]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("insult", r"LookupError: the user has left \(.*guess_v1.py:\d+\)"),
        ("3 explode", r"KeyError: 'no such thing' \(.*guess_v1.py:\d+\)"),
    ],
)
def test_an_error_in_the_middle_is_a_failure_with_its_line(play, said, why):
    game = play(3, args={"user_opens": False})
    assert game.log[-1] == {"role": "user", "content": "Guess number 3."}
    game.say("1")
    end = game.say(said)
    (failure,) = end.failures
    assert re.match(f"error: env.verifiers.theirs: {why}$", failure)
    # The conversation is over; the environment is not.
    game.log.append({"role": "assistant", "content": "3"})
    again = game.environment.step([game.log], [game.metadata])
    assert "was closed" in again.failures[0]


def test_an_episode_that_is_not_its_row_is_a_failure(play):
    game = play(3)
    game.log[-1] = {"role": "user", "content": "Guess your number."}
    assert "begins otherwise than the row's prompt" in game.say("3").failures[0]
    other = play(3)
    del other.metadata["verifiers"]
    assert "not of env.verifiers.theirs" in other.say("3").failures[0]
    several = play(0)
    (failure,) = several.say("0 again").failures
    assert "'player', the policy, has several conversations in one episode" in failure


def servers():
    return [one for one in psutil.Process().children(recursive=True) if "adder_v1" in one.cmdline()]


CALL = 'I add.\n<tool_call>\n{"name": "adder_add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def test_tools_are_shown_called_and_closed(play):
    game = play(2, id="adder-v1", args={"task": {"served": True}}, max_turns=9)
    (schema,) = game.environment.spec.tools
    assert schema["function"]["name"] == "adder_add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert not servers()  # that of the task that was begun to read the schemas
    assert game.say(CALL) == [{"role": "tool", "content": "4"}]
    assert len(servers()) == 1
    (answer,) = game.say('<tool_call>{"name": "adder_add", "arguments": {"a": 2}}</tool_call>')
    assert "Field required" in answer["content"]
    (answer,) = game.say("<tool_call>{</tool_call>")
    assert "the call cannot be read: it is not valid JSON" in answer["content"]
    # What no server of tools could be sent is answered as well: it is no way out of a reward.
    for unsent in (r'"\ud800"', "[" * 900 + "]" * 900):
        text = CALL.replace('"a": 2', f'"a": {unsent}')
        (answer,) = game.say(text)
        assert "the call cannot be read: " in answer["content"]
    (answer,) = game.say(CALL.replace('"a": 2', '"a": 1e999'))
    assert "rror" in answer["content"]
    (answer,) = game.say('<tool_call>{"name": "multiply", "arguments": {}}</tool_call>')
    assert answer["content"] == "error: unknown tool 'multiply'; there are adder_add"
    # Cut off here: what the conversation holds is closed, and nothing else.
    game.environment.close_conversations([game.metadata])
    assert not servers()
    again = play(2, id="adder-v1", args={"task": {"served": False}}, max_turns=9)
    assert again.say(CALL) == [{"role": "tool", "content": "4"}]
    end = again.say("4")
    assert end.failures == [None]
    assert end.rewards["right"].tolist() == [2.0]
    assert end.notes == [{"sums": 1.0}]


def test_a_reward_may_read_the_runtime(play):
    game = play(0, id="vowels-of-a-file")
    end = game.say("1")
    assert end.failures == [None]
    assert end.rewards["by_a_file"].tolist() == [1.0]


def test_a_step_that_is_given_up_is_released_by_the_close(play):
    """The user of this episode never answers, until the conversation is closed."""
    game = play(3, args={"user_opens": False}, env={"player": {}})
    game.say("1")
    conversation = game.environment._opened.conversations["a"]
    conversation.answer = lambda *said: None
    returned = []
    waiting = threading.Thread(target=lambda: returned.append(game.say("2")))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    game.environment.close_conversations([game.metadata])
    waiting.join(10)
    assert "was closed" in returned[0].failures[0]


def test_a_conversation_that_was_closed_does_not_begin(play):
    game = play(3, args={"user_opens": False})
    game.environment.close_conversations([game.metadata])
    assert "was closed" in game.say("1").failures[0]
    assert not game.environment._opened.conversations


def test_a_close_before_an_episode_begins_to_run_releases_its_step(play):
    game = play(3, args={"user_opens": False})
    runner = game.environment._opened
    task = game.environment._loaded.task_of(game.metadata["verifiers"])

    async def closed():
        conversation = runner.begin("b", task)
        await runner.end(["b"])
        return await asyncio.wait_for(conversation.news.get(), 10)

    assert runner.call(closed()) == "the conversation was closed"


def test_a_program_that_ends_the_runner_ends_the_run(play):
    game = play(3, args={"user_opens": False})
    for said in ("3 exit", "3"):
        with pytest.raises(WorkerError, match=r"has ended: SystemExit\(3\)") as lost:
            game.say(said)
        assert lost.value.is_lost


class SimulatedUser(JSONHandler):
    """A server of chat completions: it asks for the vowels, and ends when it is told a number."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]["content"]
        said = "###DONE###" if last.isdigit() else "How many vowels, exactly?"
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": said},
            "finish_reason": "stop",
        }
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        self.answer(200, {**whole, "choices": [choice]})


def test_their_simulated_user_runs_unchanged(play):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimulatedUser)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        game = play(
            0,
            id="vowels-v1",
            env={
                "id": "user-sim",
                "user": {
                    "model": "m",
                    "client": {"type": "eval", "base_url": url, "api_key_var": "NONE"},
                },
            },
        )
        assert game.log[-1] == {"role": "user", "content": "How many vowels, exactly?"}
        assert game.say("let me see") == user("How many vowels, exactly?")
        end = game.say("1")
        assert end.failures == [None]
        assert end.rewards["right"].tolist() == [1.0]
        assert end.notes == [{"length": 1.0, "user_turns": 3.0}]
    finally:
        server.shutdown()
        server.server_close()


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


def test_a_run_over_several_turns(tasksets, tmp_path):
    saved = sft(
        sft_settings(
            tmp_path / "sft", "policy.max_total_sequence_length=256", "sft.max_num_epochs=8"
        )
    ).outcome.latest
    settings = [one for one in grpo_settings(tmp_path, saved) if not one.startswith("data.")]
    grpo(
        [
            *settings,
            "policy.max_total_sequence_length=256",
            "data.dataset_name=verifiers",
            "data.env_name=guess",
            "data.split_validation_size=0.4",
            "env.verifiers={guess: {id: guess-v1, args: {num_tasks: 40, user_opens: false}}}",
            "grpo.max_num_steps=2",
            "grpo.max_rollout_turns=3",
        ]
    )
    figures = metrics_of(tmp_path)[1]
    assert figures["env/guess/num_failures"] == 0.0
    # It says what it has learned, in boxes: never a number, so that all of its turns are used up,
    # and scored.
    assert figures["env/guess/metric/guesses"] > 2.0
    assert "train/rewards/found/mean" in figures
    (said, *_) = completions_of(tmp_path, 1)
    assert said["num_turns"] > 1
    assert "[environment] A number, please. [policy]" in said["completion"]


def test_a_run_with_tools_shows_them(tasksets, tmp_path):
    settings = [one for one in grpo_settings(tmp_path, None) if not one.startswith("data.")]
    changes = (
        "policy.max_total_sequence_length=512",
        "policy.tokenizer.chat_template=hermes",
        "data.dataset_name=verifiers",
        "data.env_name=adder",
        "data.split_validation_size=0",
        "env.verifiers={adder: {id: adder-v1, args: {num_tasks: 12}}}",
        "grpo.max_num_steps=1",
    )
    with pytest.raises(ConfigError, match="take two turns"):
        grpo([*settings, *changes])
    grpo([*settings, *changes, "grpo.max_rollout_turns=2"])
    assert metrics_of(tmp_path)[1]["env/adder/num_failures"] == 0.0


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
    monkeypatch.delitem(sys.modules, "laurel.extensions.verifiers.runner", raising=False)
    config = config_of(vowels={"id": "vowels-v1"})
    with pytest.raises(MissingDependencyError, match="verifiers"):
        verifiers.taskset_rows(
            TaskSetConfig(dataset_name="verifiers", env_name="vowels"), config.verifiers
        )

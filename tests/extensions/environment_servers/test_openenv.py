"""A server of OpenEnv in a process of its own: `make test-environments` installs the package."""

import random
import sys
import threading

import pytest

from laurel.config.data import TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.environments.registry import create_environment, row_sources
from laurel.errors import ConfigError, EnvironmentFailedError, MissingDependencyError
from laurel.extensions.environment_servers.sessions import SessionEnvironment
from policy_runs import task_data
from sandbox_processes import wait_until
from session_servers import ServerProcess


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    pytest.importorskip("openenv", reason="make test-environments installs openenv-core")
    with ServerProcess("openenv_server.py", tmp_path_factory.mktemp("server")) as server:
        yield server


def config_of(server, *, seconds=200.0, **settings):
    given = {"url": server.url, "action_key": "guess", "observation_key": "hint", **settings}
    return EnvironmentsConfig(openenv={"game": given}, timeout_seconds=seconds)


def load(config, **data):
    data = {"dataset_name": "openenv", "split_validation_size": 0, **data}
    return task_data(config, **data).train


class Game:
    """One conversation with an environment, as rollouts hold it."""

    def __init__(self, environment, task):
        self.environment, self.log = environment, [vars_of(m) for m in task.prompt]
        self.metadata = {**task.metadata, "laurel_conversation_id": f"{task.id} {random.random()}"}

    def say(self, text):
        self.log.append({"role": "assistant", "content": text})
        verdict = self.environment.step([self.log], [self.metadata])
        (observation,) = verdict.observations
        if isinstance(observation, list):
            self.log += observation
        return verdict


def vars_of(message):
    return {"role": message.role, "content": message.content}


def number_of(seed):
    return random.Random(seed).randint(1, 9)


def test_seeds_become_tasks_and_a_session_plays_one(server, tmp_path):
    config = config_of(server)
    frame = tmp_path / "prompt.txt"
    frame.write_text("A game.\n\n{}")
    tasks = load(config, env_name="game", max_samples=4, prompt_file=str(frame))
    assert [m.content for m in tasks[3].prompt] == [
        "A game.\n\nGuess a number from 1 to 9, game 3.",
    ]
    assert [task.environment for task in tasks] == ["game"] * 4
    wanted = number_of(3)
    wrong = wanted % 9 + 1
    before = server.counts()[0]
    with create_environment("game", config) as environment:
        one, other = Game(environment, tasks[3]), Game(environment, tasks[3])
        first = one.say(str(wrong))
        assert first.rewards.tolist() == pytest.approx([-0.1])
        said = "lower" if wrong > wanted else "higher"
        assert first.observations == [[{"role": "user", "content": said}]]
        assert first.terminateds.tolist() == [False]
        assert other.say(str(wanted)).terminateds.tolist() == [True], "of its own number of tries"
        last = one.say(str(wanted))
        assert (last.rewards.tolist(), last.terminateds.tolist()) == ([1.0], [True])
        assert last.notes == [{"turns": 2.0, "refused": 0.0, "ended": 1.0}]
        assert environment.num_open == 0
        # One is opened to see whether the server is there.
        wait_until(lambda: server.counts() == (before + 3, before + 3))


def test_what_the_environment_does_not_take_is_answered_and_what_breaks_it_is_a_failure(server):
    config = config_of(server, action_tag="move")
    task = load(config, env_name="game", max_samples=1)[0]
    with create_environment("game", config) as environment:
        game = Game(environment, task)
        untagged = game.say("5")
        assert untagged.observations[0][0]["content"] == (
            "Error: write your action as <move>...</move>"
        )
        words = game.say("<move>1</move> or <move>banana</move>")
        assert words.observations[0][0]["content"] == (
            "Error: the environment does not take this action"
        )
        assert words.notes == [{"turns": 2.0, "refused": 2.0, "ended": 0.0}]
        assert words.rewards.tolist() == [0.0]
        raised = game.say("<move>raise</move>")
        assert "the dice fell off the table (code: EXECUTION_ERROR)" in raised.failures[0]
        assert "has ended" in game.say("<move>1</move>").failures[0]


def test_an_action_that_never_ends_is_a_failure_alone(server):
    config = config_of(server, seconds=10.0)
    task = load(config, env_name="game", max_samples=1)[0]
    with create_environment("game", config) as environment:
        slow, game = Game(environment, task), Game(environment, task)
        game.say(str(number_of(0) % 9 + 1))
        assert "no answer to a step within 1 s" in slow.say("sleep").failures[0]
        assert game.say(str(number_of(0))).rewards.tolist() == [1.0]


def test_actions_in_json_and_observations_whole(server):
    config = config_of(server, action_key=None, observation_key=None, role="tool")
    task = load(config, env_name="game", max_samples=1)[0]
    with create_environment("game", config) as environment:
        game = Game(environment, task)
        wrong = number_of(0) % 9 + 1
        assert "no JSON" in game.say("three").observations[0][0]["content"]
        answer = game.say(f'<think>{{}}</think>{{"guess": {wrong}}}').observations[0][0]
        assert answer["role"] == "tool"
        assert '"tries": 1' in answer["content"]
        no_actions = ['"\\ud800"', "[" * 99 + "]" * 99, "NaN", "1e999"]
        for text in ("[" * 5000, *('{"guess": ' + one + "}" for one in no_actions)):
            verdict = game.say(text)
            assert (verdict.failures, verdict.notes[0]["ended"]) == ([None], 0.0)
            assert verdict.observations[0][0]["content"].startswith("Error: the action ")
        # The server cannot write down what this validator raises, and ends the session.
        unlucky = game.say('{"guess": 13}')
        assert (unlucky.failures, unlucky.terminateds.tolist()) == ([None], [True])
        assert unlucky.notes == [{"turns": 8.0, "refused": 7.0, "ended": 1.0}]


def test_the_policy_does_not_change_the_fields_of_every_action(server):
    config = config_of(server, action_key=None, action_fields={"guess": number_of(0)})
    task = load(config, env_name="game", max_samples=1)[0]
    with create_environment("game", config) as environment:
        assert Game(environment, task).say('{"guess": 0}').rewards.tolist() == [1.0]


def test_a_server_that_comes_back_goes_on_with_its_sessions(tmp_path, shared):
    with ServerProcess("openenv_server.py", tmp_path) as server:
        config = config_of(server, seconds=1200.0)
        task = load(config, env_name="game", max_samples=1)[0]
        with create_environment("game", config) as environment:
            game = Game(environment, task)
            game.say(str(number_of(0) % 9 + 1))
            server.kill()
            starting = threading.Thread(target=server.start)
            starting.start()
            verdict = game.say(str(number_of(0)))
            starting.join()
            assert (verdict.failures, verdict.rewards.tolist()) == ([None], [1.0])
            assert verdict.notes == [{"turns": 2.0, "refused": 0.0, "ended": 1.0}]


@pytest.mark.parametrize(
    ("settings", "data", "said"),
    [
        ({}, {"env_name": "math", "max_samples": 1}, "is no environment of env.openenv"),
        ({"observation_key": "text"}, {"env_name": "game", "max_samples": 1}, "no 'text'"),
        (
            {"url": "http://127.0.0.1:9", "seconds": 1.0},
            {"env_name": "game", "max_samples": 1},
            "has not answered for .* the server started",
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_the_run(server, settings, data, said):
    with pytest.raises((ConfigError, EnvironmentFailedError), match=said):
        load(config_of(server, **settings), **data)


def test_a_server_that_is_full_or_does_not_repeat_itself_is_said(tmp_path, shared):
    with ServerProcess("openenv_server.py", tmp_path, "1", "--drift") as server:
        config = config_of(server, seconds=10.0)
        task = load(config, env_name="game", max_samples=1)[0]
        with create_environment("game", config) as environment:
            drifted = Game(environment, task).say("1")
            assert "shows something else than when the rows were made" in drifted.failures[0]
            task.metadata["openenv"].pop("start")
            first, second = Game(environment, task), Game(environment, task)
            first.say("raise" if number_of(0) == 1 else "1")
            assert "has no more sessions" in second.say("1").failures[0]
            environment.close_conversations([first.metadata])
            assert Game(environment, task).say("raise").failures != [None]


def test_the_number_of_seeds_is_asked_for_before_a_server_is_waited_for():
    config = EnvironmentsConfig(openenv={"game": {"url": "http://127.0.0.1:9"}})
    asked = TaskSetConfig(dataset_name="openenv", env_name="game")
    with pytest.raises(ConfigError, match=r"how many seeds make one \(data\.max_samples\)"):
        row_sources(config)["openenv"](asked)


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    for name in ("openenv", "openenv.core", "openenv.core.generic_client"):
        monkeypatch.setitem(sys.modules, name, None)
    config = EnvironmentsConfig(openenv={"game": {"url": "http://127.0.0.1:9"}})
    asked = TaskSetConfig(dataset_name="openenv", env_name="game", max_samples=1)
    with pytest.raises(MissingDependencyError, match="openenv-core"):
        row_sources(config)["openenv"](asked)


def test_it_is_an_environment_of_sessions(server):
    with create_environment("game", config_of(server)) as environment:
        assert isinstance(environment, SessionEnvironment)

"""What is an outage, a failure or neither, with a server that each test makes up."""

import asyncio
import re

import pytest

from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError, EnvironmentFailedError, WorkerError
from laurel.extensions.environment_servers.sessions import (
    ServerFullError,
    SessionEnvironment,
    SessionLostError,
    SessionTurn,
)


class Echo:
    """A session that says again what it gets; `faults` of the server are popped by message."""

    def __init__(self, server):
        self.server, self.is_closed = server, False

    async def turn(self, message):
        for fault in self.server.faults.get(message, [])[:1]:
            self.server.faults[message].pop(0)
            await fault()
        return SessionTurn(messages=({"role": "user", "content": message},), reward=1.0)

    async def close(self):
        self.is_closed = True


class Server:
    where, key, tools = "env.x", "made_up", ()

    def __init__(self):
        self.faults, self.opening, self.reaching, self.opened = {}, [], [], []

    async def reach(self):
        if self.reaching:
            await self.reaching.pop(0)()

    async def open(self, task):
        if self.opening:
            await self.opening.pop(0)()
        self.opened.append(Echo(self))
        return self.opened[-1]

    async def make_rows(self, limit, split, made):
        while len(made) < limit:
            for fault in self.faults.pop(len(made), []):
                await fault()
            made.append({"row": len(made)})

    async def aclose(self):
        assert all(session.is_closed for session in self.opened)


async def lost():
    raise SessionLostError("gone")


async def full():
    raise ServerFullError("no more sessions")


async def hangs():
    await asyncio.sleep(60)


async def slow_then_lost():
    await asyncio.sleep(0.6)
    raise SessionLostError("gone")


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def environment(server):
    with SessionEnvironment(server, url="http://h:1", limit=0.5) as made:
        yield made


def say(environment, *messages):
    log = [{"role": "user", "content": "q"}]
    log += [{"role": "assistant", "content": message} for message in messages]
    metadata = {"made_up": {}, "laurel_conversation_id": "c"}
    verdict = environment.step([log], [metadata])
    return verdict.failures[0], verdict.rewards.item()


def test_a_loss_while_known_messages_are_sent_again_is_waited_for(server, environment):
    say(environment, "a")
    server.faults = {"b": [lost], "a": [lost, lost]}
    assert say(environment, "a", "b") == (None, 1.0)
    assert len(server.opened) == 4
    assert [session.is_closed for session in server.opened] == [True, True, True, False]


def test_a_server_that_stays_away_while_messages_are_sent_again_is_an_outage(server, environment):
    say(environment, "a")
    server.faults = {"b": [lost], "a": [lost] * 1000}
    with pytest.raises(WorkerError, match="has not answered") as caught:
        say(environment, "a", "b")
    assert caught.value.is_lost


def test_a_message_at_which_two_sessions_are_lost_is_a_failure(server, environment):
    server.faults = {"a": [lost, lost]}
    failure, _ = say(environment, "a")
    assert "two sessions in a row were lost at the same message" in failure


def test_patience_begins_with_the_outage_and_again_with_every_row(server, environment):
    server.faults = {2: [slow_then_lost], 4: [slow_then_lost]}
    assert [row["row"] for row in environment.rows(6)] == list(range(6))


def test_a_slow_step_is_a_failure_and_a_server_that_hangs_is_waited_for(
    server, environment, monkeypatch
):
    monkeypatch.setattr("laurel.extensions.environment_servers.sessions._REACHING_SECONDS", 0.1)
    server.faults, server.reaching = {"a": [hangs]}, [hangs]
    assert say(environment, "a") == (None, 1.0)
    server.faults = {"b": [hangs]}
    assert (
        "no answer to a step within 0.5 s (a tenth of env.timeout_seconds)"
        in say(environment, "a", "b")[0]
    )


def test_a_slow_beginning_is_a_failure_that_names_the_limit(server, environment):
    server.opening = [hangs]
    failure, _ = say(environment, "a")
    assert (
        "no answer to the beginning of a session within 0.5 s (a tenth of env.timeout_seconds)"
        in failure
    )


@pytest.mark.parametrize("patience", [0.3, 5.0])
def test_a_full_server_is_given_a_moment_and_no_longer(server, monkeypatch, patience):
    # At 0, 0.1 and 0.3 s; in 5 s it would be asked seven times.
    monkeypatch.setattr(
        "laurel.extensions.environment_servers.sessions._CLOSING_SECONDS", 5.3 - patience
    )
    with SessionEnvironment(server, url="http://h:1", limit=patience) as environment:
        server.opening = [full]
        assert say(environment, "a") == (None, 1.0)
        environment.close_conversations([{"laurel_conversation_id": "c"}])
        server.opening = [full] * 100
        log = [[{"role": "assistant", "content": "a"}]]
        verdict = environment.step(log, [{"made_up": {}, "laurel_conversation_id": "d"}])
        assert "no more sessions" in verdict.failures[0]
        assert 100 - len(server.opening) in (2, 3, 4)


def test_a_row_whose_session_is_slow_to_begin_names_the_limit(server, environment):
    async def times_out():
        raise TimeoutError

    server.faults = {1: [times_out]}
    with pytest.raises(EnvironmentFailedError, match=r"within 0.5 s \(a tenth of env.timeout"):
        environment.rows(2)


@pytest.mark.parametrize(
    ("kind", "setting", "said"),
    [
        ("openenv", "step_timeout: 30", "a tenth of env.timeout_seconds"),
        ("openreward", "connect_patience: 30", "a tenth of env.timeout_seconds"),
        ("openenv", "instruction: Play", "data.prompt_file"),
        ("openreward", "split: test", "data.train_split"),
        ("openreward", "form: hermes", "policy.tokenizer.chat_template"),
    ],
)
def test_a_key_that_is_gone_is_refused_with_what_holds_now(kind, setting, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(GRPORun, None, [f"env.{kind}={{x: {{url: 'http://h:1', {setting}}}}}"])


def test_fields_of_every_action_leave_the_policy_its_own():
    given = {"url": "http://h:1", "action_key": "guess", "action_fields": {"guess": 1}}
    with pytest.raises(ValueError, match=r"action_fields has guess \(action_key\)"):
        EnvironmentsConfig(openenv={"x": given})

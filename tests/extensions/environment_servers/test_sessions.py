"""When sessions begin and end, and what becomes of a lost one, with a server in this process."""

import asyncio
import re
import threading
from dataclasses import dataclass, field

import pytest

from laurel.config.grpo_run import GRPORun
from laurel.errors import ConfigError, EnvironmentFailedError, WorkerError
from laurel.extensions.environment_servers.sessions import (
    SessionEnvironment,
    SessionLostError,
    SessionTurn,
)
from policy_fakes import SAMPLING, Say, ScriptedGenerator, rollouts_of, task
from sandbox_processes import wait_until

AT = {"url": "http://127.0.0.1:1", "limit": 0.4}


@dataclass
class Talk:
    """A session that echoes: `over` ends it, `lost` loses it once, `raise` and `hang` break it."""

    server: "Talks"
    number: int
    said: int = 0
    is_closed: bool = False

    async def turn(self, message):
        self.server.asked.append((self.number, message))
        if message == "lost" and self.server.losses:
            self.server.losses -= 1
            raise SessionLostError("the line is dead")
        if message == "raise":
            raise KeyError("no such thing")
        if message == "hang":
            await asyncio.Event().wait()
        self.said += 1
        reward = None if message == "nothing" else 0.5
        answer = f"{self.said}: {message}" + (f" {self.number}" if self.server.drifts else "")
        return SessionTurn(
            messages=({"role": "user", "content": answer},),
            reward=reward,
            is_over=message in ("over", "nothing"),
            num_refused=int(message == "refused"),
        )

    async def close(self):
        assert not self.is_closed
        self.is_closed = True


@dataclass
class Talks:
    losses: int = 0
    drifts: bool = False
    refuses: int = 0
    opened: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    is_closed: bool = False
    gate: threading.Event | None = None
    where, key = "env.talk.me", "talk"
    tools = ()

    async def reach(self):
        self._refuse()

    def _refuse(self):
        if self.refuses:
            self.refuses -= 1
            raise SessionLostError("connection refused")

    async def open(self, task):
        self._refuse()
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.001)
        self.opened.append(Talk(self, len(self.opened)))
        return self.opened[-1]

    async def make_rows(self, limit, split, made):
        made += [{"prompt": "q", "metadata": {"talk": {}}}] * limit

    async def aclose(self):
        self.is_closed = True

    @property
    def num_left(self):
        return sum(not one.is_closed for one in self.opened)


@pytest.fixture
def talks():
    return Talks()


@pytest.fixture
def environment(talks):
    with SessionEnvironment(talks, **AT) as made:
        yield made
    assert (talks.num_left, made.num_open) == (0, 0)
    assert talks.is_closed


def log(*texts):
    said = [{"role": "user", "content": "q"}]
    for text in texts:
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "..."}]
    return said[:-1]


def named(name):
    return {"talk": {}, "laurel_conversation_id": name}


def test_a_session_lasts_as_long_as_its_conversation(environment, talks):
    first = environment.step([log("a"), log("b")], [named("x"), named("y")])
    assert first.observations == [
        [{"role": "user", "content": "1: a"}],
        [{"role": "user", "content": "1: b"}],
    ]
    assert first.terminateds.tolist() == [False, False]
    assert environment.num_open == 2
    second = environment.step([log("a", "refused"), log("b", "over")], [named("x"), named("y")])
    assert second.observations[0] == [{"role": "user", "content": "2: refused"}]
    assert second.terminateds.tolist() == [False, True]
    assert second.rewards.tolist() == [0.5, 0.5], "of this turn: rollouts add them up"
    assert second.notes == [
        {"turns": 2.0, "refused": 1.0, "ended": 0.0},
        {"turns": 2.0, "refused": 0.0, "ended": 1.0},
    ]
    assert (len(talks.opened), talks.num_left, environment.num_open) == (2, 1, 1)
    environment.close_conversations([named("x"), named("never seen"), None])
    assert talks.num_left == 0


def test_without_an_id_the_metadata_that_it_returns_goes_on(environment, talks):
    returned = environment.step([log("a")], [{"talk": {}}])
    environment.step([log("a", "over")], returned.metadata)
    assert talks.asked == [(0, "a"), (0, "over")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("raise", r"error: env\.talk\.me: KeyError: 'no such thing' \(.*test_sessions\.py:\d+\)"),
        ("hang", r"timeout: no answer to a step within 0\.4 s \(a tenth of env.timeout_seconds"),
        ("nothing", "the session ended without any reward"),
    ],
)
def test_a_failure_closes_its_session_and_no_other(environment, talks, said, reason):
    verdict = environment.step([log(said), log("a")], [named("x"), named("y")])
    assert verdict.failures[1] is None
    assert verdict.terminateds.tolist() == [True, False]
    assert re.search(reason, verdict.failures[0])
    assert (talks.num_left, environment.num_open) == (1, 1)
    again = environment.step([log(said, "a")], [named("x")])
    assert "the conversation has ended" in again.failures[0]


@pytest.mark.parametrize(
    ("metadata", "said", "reason"),
    [
        ({}, log("a"), "the task is not of this server"),
        (None, log("a"), "the task is not of this server"),
        (named("z"), log("a", "b"), "the conversation has no session to go on in"),
    ],
)
def test_what_it_cannot_play_is_a_failure(environment, metadata, said, reason):
    assert reason in environment.step([said], [metadata]).failures[0]


def test_a_lost_session_is_begun_anew_where_it_answers_as_before(environment, talks):
    talks.losses = 1
    environment.step([log("a")], [named("x")])
    environment.step([log("a", "b")], [named("x")])
    verdict = environment.step([log("a", "b", "lost")], [named("x")])
    assert verdict.failures == [None]
    assert verdict.observations == [[{"role": "user", "content": "3: lost"}]]
    assert verdict.rewards.tolist() == [0.5]
    assert talks.asked[2:] == [(0, "lost"), (1, "a"), (1, "b"), (1, "lost")]
    assert [one.is_closed for one in talks.opened] == [True, False]


def test_a_lost_session_that_does_not_repeat_itself_is_a_failure_and_no_zero(environment, talks):
    talks.losses, talks.drifts = 1, True
    environment.step([log("a")], [named("x")])
    verdict = environment.step([log("a", "lost")], [named("x")])
    assert "the session is lost (the line is dead), and a new one answers" in verdict.failures[0]
    assert talks.num_left == 0


def test_an_outage_is_waited_for(environment, talks, caplog):
    talks.refuses = 2
    verdict = environment.step([log("a")], [named("x")])
    assert verdict.failures == [None]
    assert "waiting for http://127.0.0.1:1" in caplog.text


def test_a_server_that_stays_away_is_a_lost_worker(environment, talks):
    talks.refuses = 10**6
    with pytest.raises(WorkerError, match=r"has not answered for 0\.4 s") as caught:
        environment.step([log("a")], [named("x")])
    assert caught.value.is_lost, "the run ends with exit code 75, and goes on later"


def test_a_server_that_is_not_there_at_the_start_is_said(talks):
    talks.refuses = 10**6
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 has not answered .*the server started"):
        SessionEnvironment(talks, **AT)
    assert talks.is_closed


def test_closing_ends_a_turn_that_still_runs(talks):
    with SessionEnvironment(talks, url="http://127.0.0.1:1", limit=60.0) as environment:
        results = []
        thread = threading.Thread(
            target=lambda: results.append(environment.step([log("hang")], [named("x")]))
        )
        thread.start()
        wait_until(lambda: talks.asked)
        environment.close_conversations([named("x")])
        assert talks.num_left == 0
        thread.join(10)
        assert "the conversation was closed" in results[0].failures[0]


def test_closing_before_a_session_has_opened_leaves_none(talks):
    talks.gate = threading.Event()
    with SessionEnvironment(talks, **AT) as environment:
        thread = threading.Thread(target=lambda: environment.step([log("a")], [named("x")]))
        thread.start()
        wait_until(lambda: environment._running)
        environment.close_conversations([named("x"), named("y")])
        talks.gate.set()
        thread.join(10)
        late = environment.step([log("a")], [named("y")])
        assert "the conversation has ended" in late.failures[0]
        assert not talks.opened


def test_shutting_down_ends_turns_and_closes_sessions(talks):
    environment = SessionEnvironment(talks, **AT)
    environment.step([log("a")], [named("x")])
    environment.shutdown()
    environment.shutdown()
    assert (talks.num_left, talks.is_closed) == (0, True)
    with pytest.raises(EnvironmentFailedError, match="was shut down"):
        environment.step([log("a", "b")], [named("x")])


@pytest.mark.parametrize("end", ["over", "turns", "cut off", "engine", "cancelled"])
def test_rollouts_leave_no_session_behind(environment, talks, end):
    def script(request):
        number = len(request.seeds_G)
        if number == 1 and end == "engine":
            return [RuntimeError("the engine died")]
        if number == 1 and end == "cancelled":
            return [None]
        reason = "length" if end == "cut off" else "stop"
        return [(i, Say("over" if end == "over" else "a", reason)) for i in range(number)]

    generator = ScriptedGenerator(script)
    rollouts = rollouts_of(generator, judge=environment, max_turns=3, max_length=200)
    tasks = [task("q", talk={}), task("r", talk={})]

    async def run():
        playing = asyncio.ensure_future(
            rollouts.play(tasks, num_generations=2, sampling=SAMPLING, batch=(0,))
        )
        if end == "cancelled":
            while environment.num_open < 4 or len(generator.open) < 4:
                await asyncio.sleep(0.001)
            playing.cancel()
        return (await asyncio.gather(playing, return_exceptions=True))[0]

    groups = asyncio.run(run())
    rollouts.close()
    assert environment.num_open == 0
    # An engine that dies can do so before the last session opens.
    assert len(talks.opened) == 4 or end == "engine"
    assert talks.num_left == 0
    if end in ("over", "turns"):
        rewards = [r.reward for g in groups for r in g.rollouts_G]
        assert rewards == [0.5 if end == "over" else 1.5] * 4


def test_figures_of_sessions(environment):
    notes = [
        {"turns": 1.0, "refused": 0.0, "ended": 1.0},
        {"turns": 3.0, "refused": 2.0, "ended": 0.0},
    ]
    batch = {
        "group_ids": ["a", "a", "b"],
        "is_end": [1.0] * 3,
        "generation_lengths": [3.0] * 3,
        "prompt_lengths": [7.0] * 3,
        "notes": [*notes, None],
    }
    figures = environment.global_post_process_and_metrics(batch)[1]
    assert (figures["turns"], figures["refused"], figures["ended"]) == (2.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "localhost:8000"}, "is no address"),
        ({"url": "http://me:secret@here:1"}, "has a password"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        GRPORun(env={"openenv": {"mine": settings}})

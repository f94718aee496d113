"""Several environments on one sample: sums, gates, failures, figures."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from environment_batches import batch_of, log_of, total
from laurel.environments import composite as composite_parts
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    RejectedTask,
)
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.extensions.math.environment import MathEnvironment
from laurel.types import Message, Task


class Says(EnvironmentInterface):
    """Gives each conversation what a function makes of its last message."""

    def __init__(
        self,
        judge,
        *,
        last_turn=1,
        judges="completion",
        stop_strings=(),
        noise=0.0,
        has_state=False,
    ):
        self.judge = judge
        self.last_turn = last_turn
        self.spec = EnvironmentSpec(
            judges=judges, stop_strings=stop_strings, noise_floor=noise, has_state=has_state
        )
        self.batches = []
        self.metadata = []
        self.shutdowns = 0
        self.state = None

    def step(self, message_log_batch, metadata):
        self.metadata.append(list(metadata))
        size = len(message_log_batch)
        judged = [self.judge(log[-1]["content"]) for log in message_log_batch]
        failed = [one if isinstance(one, str) else None for one in judged]
        values = [float("nan") if isinstance(one, str) else one for one in judged]
        turns = [sum(m["role"] == "assistant" for m in log) for log in message_log_batch]
        parts = [one for one in values if isinstance(one, dict)]
        rewards = (
            {name: torch.tensor([one[name] for one in values]) for name in parts[0]}
            if parts
            else torch.tensor(values, dtype=torch.float32)
        )
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "ok"} for _ in range(size)],
            metadata=[{"turn": turn} for turn in turns],
            next_stop_strings=[list(self.spec.stop_strings) or None] * size,
            rewards=rewards,
            terminateds=torch.tensor([turn >= self.last_turn for turn in turns]),
            failures=failed,
        )

    def global_post_process_and_metrics(self, batch):
        self.batches.append(batch)
        rewards = batch["rewards"]
        return batch, {"own_env/mean": float(rewards.mean())} if len(rewards) else {}

    def validate(self, tasks):
        return [RejectedTask(task=task, reason="no") for task in tasks if task.id == "bad"]

    def end_batch(self, batch):
        self.state = batch["rewards"].tolist()

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]

    def shutdown(self):
        self.shutdowns += 1


def length(text):
    return float(len(text))


def composite(parts, environments, **settings):
    return CompositeEnvironment({"parts": parts, **settings}, environments)


def judged(environment, *texts):
    return environment.step([log_of(text) for text in texts], [{} for _ in texts])


def test_the_weighted_sum_and_its_components():
    parts = [{"env": "length"}, {"env": "vowels", "weight": -0.5}]
    environments = {"length": Says(length), "vowels": Says(lambda t: float(t.count("a")))}
    returned = judged(composite(parts, environments), "banana", "b")
    assert {name: values.tolist() for name, values in returned.rewards.items()} == {
        "length": [6.0, 1.0],
        "vowels": [-1.5, 0.0],
    }
    assert total(returned) == [4.5, 1.0]
    assert all(values.dtype == torch.float64 for values in returned.rewards.values())


def test_components_of_parts_keep_their_names():
    two = Says(lambda t: {"form": 1.0, "content": float(len(t))})
    parts = [{"env": "two", "weight": 2.0}, {"env": "length"}]
    returned = judged(composite(parts, {"two": two, "length": Says(length)}), "abc")
    assert {name: values.tolist() for name, values in returned.rewards.items()} == {
        "two/form": [2.0],
        "two/content": [6.0],
        "length": [3.0],
    }


def numbers_of_torch(values):
    return [torch.tensor(one) for one in values]


FORMS = {
    "tensor": torch.tensor,
    "array": np.array,
    "list": list,
    "tuple": tuple,
    "numbers of torch": numbers_of_torch,
    "tensors of one": lambda values: [torch.tensor([one]) for one in values],
    "of both": lambda values: [torch.tensor(values[0]), values[1]],
}


@pytest.mark.parametrize("named", [False, True], ids=["one number", "components"])
@pytest.mark.parametrize("column", FORMS.values(), ids=FORMS)
def test_a_part_may_give_its_numbers_in_any_form(column, named):
    class Gives(Says):
        def step(self, message_log_batch, metadata):
            values = column([1 / 3, 2.0])
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": ""}] * 2,
                metadata=[None] * 2,
                next_stop_strings=[None] * 2,
                rewards={"some": values} if named else values,
                terminateds=column([True, False]),
            )

    parts = [{"env": "gives", "weight": 3.0}, {"env": "passes", "gate": 0.5}]
    environments = {"gives": Gives(length), "passes": Says(lambda text: 1.0, last_turn=2)}
    returned = judged(composite(parts, environments), "a", "b")
    # Tensors of float32 stand for their shortest decimals; nothing else is rounded to float32.
    is_wide = column in (np.array, list, tuple)
    third = 1 / 3 if is_wide else float(str(np.float32(1 / 3)))
    assert total(returned) == [3.0 * third, 6.0]
    assert returned.terminateds.tolist() == [True, False]


GATED = [{"env": "length"}, {"env": "format", "gate": 0.5}, {"env": "vowels", "weight": 3.0}]


def gated_environments():
    return {
        "length": Says(length),
        "format": Says(lambda t: float(t.startswith("ok"))),
        "vowels": Says(lambda t: float(t.count("a"))),
    }


def test_a_gate_takes_the_sum_to_the_gated_reward_and_leaves_the_components():
    environment = composite(GATED, gated_environments(), gated_reward=-1.0)
    returned = judged(environment, "ok a", "no a")
    assert {name: values.tolist() for name, values in returned.rewards.items()} == {
        "length": [4.0, 4.0],
        "vowels": [3.0, 3.0],
        "gate": [0.0, -8.0],
    }
    assert total(returned) == [7.0, -1.0]


def test_components_kept_apart_are_gated_one_by_one():
    environment = composite(GATED, gated_environments(), gated_reward=-1.0, as_components=True)
    returned = judged(environment, "ok a", "no a")
    assert {name: values.tolist() for name, values in returned.rewards.items()} == {
        "length": [4.0, -0.5],
        "vowels": [3.0, -0.5],
    }
    assert total(returned) == [7.0, -1.0]


def test_a_reward_at_the_gate_passes():
    parts = [{"env": "length"}, {"env": "length", "gate": 3.0}]
    environment = composite(parts, {"length": Says(length)}, gated_reward=-1.0)
    assert total(judged(environment, "ab", "abc", "abcd")) == [-1.0, 3.0, 4.0]


def test_an_environment_named_twice_is_asked_once():
    part = Says(length)
    judged(composite([{"env": "x"}, {"env": "x", "gate": 2.0}], {"x": part}), "abc")
    assert len(part.metadata) == 1


@pytest.mark.parametrize(("gate", "expected"), [(None, 5.0), (0.5, 4.0)])
def test_a_part_or_a_gate_that_fails_fails_the_sample_never_0(gate, expected):
    picky = Says(lambda t: "cannot read it" if t == "bad" else 1.0)
    parts = [{"env": "length"}, {"env": "picky", "gate": gate}]
    returned = judged(composite(parts, {"length": Says(length), "picky": picky}), "bad", "good")
    assert returned.failures == ["picky: cannot read it", None]
    assert total(returned)[1] == expected


def test_a_reward_that_is_not_finite_is_a_failure():
    environment = composite([{"env": "x"}], {"x": Says(lambda t: float(t))})
    returned = judged(environment, "inf", "1")
    assert returned.failures == ["x: the reward is inf", None]


def test_a_part_that_only_watches_may_fail():
    watcher = Says(lambda t: "asleep" if t == "bad" else 1.0)
    parts = [{"env": "length"}, {"env": "watcher", "weight": 0.0}]
    environment = composite(parts, {"length": Says(length), "watcher": watcher})
    returned = judged(environment, "bad", "good")
    assert returned.failures == [None, None]
    assert total(returned) == [3.0, 4.0]
    logs = [log_of("bad"), log_of("good")]
    _, figures = environment.global_post_process_and_metrics(batch_of(logs, returned))
    assert figures["watcher/reward_mean"] == 1.0
    (seen,) = watcher.batches
    assert (seen["rewards"].tolist(), seen["num_failures"]) == ([1.0], 1)


def test_an_environment_that_breaks_is_named():
    def breaks(text):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order") as caught:
        judged(composite([{"env": "x"}], {"x": Says(breaks)}), "a")
    assert "'x'" in caught.value.__notes__[0]


def test_a_part_that_returns_no_verdict_is_named():
    class Short(Says):
        def step(self, message_log_batch, metadata):
            return super().step(message_log_batch[1:], metadata[1:])

    with pytest.raises(EnvironmentFailedError, match=r"Short\.step \(\S+:\d+\) returned 1 obs"):
        judged(composite([{"env": "x"}], {"x": Short(length)}), "a", "b")


def test_parts_run_side_by_side():
    both = threading.Barrier(2, timeout=30)
    environments = {name: Says(lambda t: both.wait() * 0.0) for name in "ab"}
    judged(composite([{"env": "a"}, {"env": "b"}], environments), "x")  # alone each would wait


def test_figures_of_the_parts_have_their_own_rewards():
    environments = gated_environments()
    environment = composite(GATED, environments, gated_reward=-1.0)
    logs = [log_of("ok a"), log_of("no a"), log_of("ok")]
    returned = environment.step(logs, [{}] * 3)
    _, figures = environment.global_post_process_and_metrics(batch_of(logs, returned))
    assert figures["reward_mean"] == pytest.approx((7 - 1 + 2) / 3)
    assert figures["gated_out"] == pytest.approx(1 / 3)
    assert figures["format/own_env/mean"] == pytest.approx(2 / 3)
    assert figures["length/own_env/mean"] == pytest.approx(10 / 3)  # neither gated nor weighted
    assert figures["vowels/own_env/mean"] == pytest.approx(2 / 3)
    assert environments["length"].batches[0]["group_ids"] == ["0", "1", "2"]


def test_the_name_of_a_part_is_not_said_twice():
    class Named(Says):
        def global_post_process_and_metrics(self, batch):
            return batch, {"reward_model_env/mean": 1.0}

    environment = composite([{"env": "reward_model"}], {"reward_model": Named(length)})
    returned = environment.step([log_of("a")], [{}])
    _, figures = environment.global_post_process_and_metrics(batch_of([log_of("a")], returned))
    assert figures["reward_model/mean"] == 1.0


def test_a_conversation_of_two_turns():
    slow, quick = Says(length, last_turn=2), Says(lambda t: 1.0, last_turn=3)
    environment = composite([{"env": "slow"}, {"env": "quick"}], {"slow": slow, "quick": quick})
    first = environment.step([log_of("abc")], [{"level": 1}])
    assert not first.terminateds[0]
    longer = [*log_of("abc"), first.observations[0], {"role": "assistant", "content": "ab"}]
    second = environment.step([longer], first.metadata)
    assert second.terminateds[0]  # one of them says that it is over
    assert slow.metadata == [[{"level": 1}], [{"turn": 1}]]
    batch = batch_of([longer], second, rewards=torch.tensor([3.0 + 1.0 + 2.0 + 1.0]))
    _, figures = environment.global_post_process_and_metrics(batch)
    assert figures["slow/own_env/mean"] == 5.0  # of both turns, as the reward
    assert figures["quick/own_env/mean"] == 2.0


def test_what_the_parts_are_like_together():
    environments = {
        "a": Says(length, stop_strings=("x", "y"), noise=0.5),
        "b": Says(length, judges="group", stop_strings=("y", "z"), noise=1.0),
    }
    environment = composite([{"env": "a", "weight": -2.0}, {"env": "b"}], environments)
    assert environment.spec.judges == "group"
    assert environment.spec.stop_strings == ("x", "y", "z")
    # And the rounding of their sum, in float64, of rewards of 1 times 3, the weights together.
    assert environment.noise_floor() == pytest.approx(2.0 + 3 * 2.0**-52, abs=0)
    assert judged(environment, "t").next_stop_strings == [["x", "y", "z"]]
    assert composite([{"env": "a"}], environments).spec.judges == "completion"


def test_the_state_of_the_parts_is_kept():
    first, second = Says(length, has_state=True), Says(length, has_state=True)
    parts = [{"env": "x"}, {"env": "y", "weight": 0.5}]
    learned = composite(parts, {"x": first, "y": Says(length)})
    assert learned.spec.has_state
    logs = [log_of("a"), log_of("bcd")]
    learned.end_batch(batch_of(logs, learned.step(logs, [{}] * 2)))
    assert first.state == [1.0, 3.0], "its own rewards, not those of both"
    state = learned.state_dict()
    assert state.keys() == {"x"}
    composite(parts, {"x": second, "y": Says(length)}).load_state_dict(state)
    assert second.state == first.state
    assert not composite([{"env": "y"}], {"y": Says(length)}).spec.has_state


def test_tasks_that_a_part_rejects():
    tasks = [Task(id=i, prompt=(Message("user", "?"),), environment="c") for i in ("good", "bad")]
    environment = composite([{"env": "x"}], {"x": Says(length)})
    assert [(one.task.id, one.reason) for one in environment.validate(tasks)] == [("bad", "x: no")]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"env": "y"}], "no environment is called y; there are x"),
        ([{"env": "x", "gate": 0.5}], "all parts are gates"),
        ([{"env": "x"}, {"env": "x"}], "named twice"),
        ([{"env": "x", "wait": 1.0}], "did you mean 'weight'"),
        ([], "parts"),
    ],
)
def test_configurations_that_cannot_be_used(parts, message):
    with pytest.raises(ConfigError, match=message):
        composite(parts, {"x": Says(length)})


def test_a_part_may_not_be_called_gate_where_there_is_one():
    environments = {"gate": Says(length), "x": Says(length)}
    with pytest.raises(ConfigError, match="none may be called 'gate'"):
        composite([{"env": "gate"}, {"env": "x", "gate": 0.5}], environments)


@pytest.mark.slow
def test_a_part_that_never_comes_back_keeps_no_process_from_ending():
    program = """
import threading, time
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import EnvironmentInterface

class Hangs(EnvironmentInterface):
    def step(self, message_logs, metadata):
        has_begun.set()
        time.sleep(1000)
    def global_post_process_and_metrics(self, batch):
        return batch, {}

has_begun = threading.Event()
environment = CompositeEnvironment({"parts": [{"env": "one"}]}, {"one": Hangs()})
threading.Thread(target=environment.step, args=([[]], [{}]), daemon=True).start()
has_begun.wait()
environment.shutdown()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_part_that_never_comes_back_takes_no_more_threads_than_its_bound(monkeypatch):
    monkeypatch.setattr(composite_parts, "MAX_CALLS", 3)
    monkeypatch.setattr(composite_parts, "PATIENCE_SECONDS", 0.01)
    has_begun, comes_back = threading.Semaphore(0), threading.Event()

    def hang(text):
        has_begun.release()
        return float(comes_back.wait(60))

    environments = {"stuck": Says(hang), "quick": Says(length)}
    environment = composite([{"env": "stuck"}, {"env": "quick"}], environments)
    with ThreadPoolExecutor(3) as callers:
        calls = [callers.submit(judged, environment, "abc") for _ in range(3)]
        try:
            assert all(has_begun.acquire(timeout=60) for _ in calls)
            for _ in range(10):
                with pytest.raises(EnvironmentFailedError, match="3 calls of the part 'stuck' of"):
                    judged(environment, "abc")
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("laurel-composite-stuck") == 3
        finally:
            comes_back.set()
    assert [total(call.result()) for call in calls] == [[4.0]] * 3
    assert total(judged(environment, "a")) == [2.0], "it is asked again when it has come back"


def test_calls_beyond_the_bound_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(composite_parts, "MAX_CALLS", 2)
    lock, at_once, most = threading.Lock(), 0, 0

    def judge(text):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        if text == "bad":
            raise ValueError("unreadable")  # which gives its place back as well
        return 1.0

    environment = composite([{"env": "x"}], {"x": Says(judge)})
    with ThreadPoolExecutor(8) as callers:
        calls = [callers.submit(judged, environment, text) for text in ["good", "bad"] * 8]
    failed = [call.exception() is not None for call in calls]
    assert failed == [False, True] * 8
    assert most == 2


def conducted(other, *, gate=None, last_turn=2, **settings):
    conductor = Says(lambda text: 0.5, last_turn=last_turn, stop_strings=("</code>",))
    parts = [{"env": "tool"}, {"env": "other"}]
    if gate is not None:
        parts = [{"env": "tool"}, {"env": "other", "gate": gate}]
    config = {"parts": parts, "conducted_by": "tool", **settings}
    return CompositeEnvironment(config, {"tool": conductor, "other": other})


def said(*texts):
    log = [{"role": "user", "content": "q"}]
    for text in texts[:-1]:
        log += [{"role": "assistant", "content": text}, {"role": "environment", "content": "ok"}]
    return [*log, {"role": "assistant", "content": texts[-1]}]


def test_the_others_judge_what_a_conversation_ends_with_and_nothing_before():
    other = Says(lambda text: float(len(text)))
    environment = conducted(other)
    first = environment.step([said("a"), said("a", "end")], [{"task": 1}, {"task": 2}])
    assert first.terminateds.tolist() == [False, True]
    assert other.metadata == [[{"task": 2}]], "only what is over, with its own metadata"
    assert {k: v.tolist() for k, v in first.rewards.items()} == {
        "tool": [0.5, 0.5],
        "other": [0.0, 3.0],
    }
    second = environment.step([said("a", "done")], [first.metadata[0]])
    assert second.terminateds.tolist() == [True]
    assert second.rewards["other"].tolist() == [4.0]
    assert other.metadata[1] == [{"task": 1}], "the task's, as it was at first"


def test_nobody_else_ends_what_one_conducts():
    other = Says(lambda text: 1.0, last_turn=1)  # would end it at once
    environment = conducted(other, last_turn=3)
    found = environment.step([said("a")], [None])
    assert found.terminateds.tolist() == [False]
    assert found.next_stop_strings == [["</code>"]]
    assert found.observations[0]["content"] == "ok"
    assert other.metadata == []


def test_a_gate_waits_for_the_end_too():
    environment = conducted(Says(lambda text: 0.0), gate=1.0, gated_reward=-1.0)
    found = environment.step([said("a"), said("a", "b")], [None, None])
    assert found.rewards["tool"].tolist() == [0.5, 0.5]
    assert found.rewards["gate"].tolist() == [0.0, -1.5], "0.5 less 1.5 is the gated reward"


def test_a_failure_of_the_judge_is_one_of_the_conversation_that_it_judged():
    environment = conducted(Says(lambda text: "no idea"))
    found = environment.step([said("a"), said("a", "b")], [None, None])
    assert found.failures == [None, "other: no idea"]


def test_who_conducts_must_be_a_part():
    with pytest.raises(ConfigError, match="conducted_by=nobody is none of the parts"):
        CompositeEnvironment(
            {"parts": [{"env": "a"}], "conducted_by": "nobody"}, {"a": Says(lambda text: 1.0)}
        )


def test_an_answer_that_took_code_is_graded_by_its_mathematics():
    from laurel.extensions.code.environment import CodeEnvironment

    code = CodeEnvironment(
        {"num_workers": 1, "terminate_on_evaluation": False, "terminate_without_code": True}
    )
    config = {"parts": [{"env": "code"}, {"env": "math"}], "conducted_by": "code"}
    with CompositeEnvironment(
        config, {"code": code, "math": MathEnvironment({"num_workers": 1})}
    ) as environment:
        task = {"ground_truth": "42"}
        log = said("<code>x = 6 * 7\nx</code>")
        first = environment.step([log], [task])
        assert first.terminateds.tolist() == [False]
        assert first.observations[0]["content"].strip() == "<result>\n42\n</result>"
        assert sum(v.item() for v in first.rewards.values()) == 0.0
        log += [first.observations[0], {"role": "assistant", "content": "So it is \\boxed{42}."}]
        second = environment.step([log], [first.metadata[0]])
        assert second.terminateds.tolist() == [True]
        assert second.rewards["math"].tolist() == [1.0]
        wrong = environment.step([said("It is \\boxed{41}.")], [task])
        assert wrong.terminateds.tolist() == [True]
        assert wrong.rewards["math"].tolist() == [0.0]
        assert wrong.answers == ["41"]


class Keeps(EnvironmentInterface):
    """Ends a conversation at its `last_turn`-th turn, and remembers which it was told of."""

    def __init__(self, last_turn):
        self.last_turn = last_turn
        self.closed = []

    def step(self, message_log_batch, metadata):
        turns = [(one or {}).get("turn", 0) + 1 for one in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "go on"}] * len(turns),
            metadata=[{"turn": turn} for turn in turns],
            next_stop_strings=[None] * len(turns),
            rewards=torch.ones(len(turns)),
            terminateds=torch.tensor([turn == self.last_turn for turn in turns]),
        )

    def close_conversations(self, metadata):
        self.closed += metadata

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def test_a_part_is_told_of_conversations_that_another_part_ends():
    first, second = Keeps(2), Keeps(9)
    both = CompositeEnvironment(
        {"parts": [{"env": "first"}, {"env": "second"}]}, {"first": first, "second": second}
    )
    ids = {"laurel_group_id": "g", "laurel_conversation_id": "c"}
    logs = [log_of("a")]
    returned = both.step(logs, [{"mine": 1, **ids}])
    assert not second.closed
    both.step(logs, [{**returned.metadata[0], **ids}])
    assert second.closed == [{"turn": 2, **ids}]
    assert not first.closed, "which has ended it"


def test_every_part_is_told_of_what_no_part_has_ended(caplog):
    class Broken(Keeps):
        def close_conversations(self, metadata):
            raise OSError("no line")

    first, second = Broken(9), Keeps(9)
    both = CompositeEnvironment(
        {"parts": [{"env": "first"}, {"env": "second"}]}, {"first": first, "second": second}
    )
    ids = {"laurel_group_id": "g", "laurel_conversation_id": "c"}
    returned = both.step([log_of("a")], [ids])
    both.close_conversations([{**returned.metadata[0], **ids}])
    assert second.closed == [{"turn": 1, **ids}]
    assert "Broken.close_conversations" in caplog.text


def test_a_part_that_scores_the_end_is_told_that_it_is_the_end():
    scores = Keeps(9)
    both = CompositeEnvironment(
        {"parts": [{"env": "leads"}, {"env": "scores"}], "conducted_by": "leads"},
        {"leads": Keeps(1), "scores": scores},
    )
    both.step([log_of("a")], [{"laurel_conversation_id": "c"}])
    assert scores.closed == [{"turn": 1, "laurel_conversation_id": "c"}]

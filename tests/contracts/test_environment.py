"""What every environment does, run on each of them.

To add one: a maker that gives a `Case`, in `MAKERS`.
"""

import contextlib
import copy
import json
import math
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import environment_batches
from environment_batches import total
from laurel.config.environments import EnvironmentsConfig
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
)
from laurel.environments.registry import create_environment
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.extensions.code.environment import CodeEnvironment
from laurel.extensions.math.environment import MathEnvironment
from laurel.models.checkpoint.state import decode, encode
from laurel.models.tool_calls import FORMS, ToolCall
from laurel.rewards.scorer import LocalScorer
from laurel.rewards.version import content_of
from laurel.types import Message, Task, messages_of
from laurel.workers.reservations import Resources
from reward_models import small_model, write_model
from sandbox_processes import is_gone, wait_until
from tool_templates import TOKENIZERS

ACTORS = ("math, an actor of Ray", "code, an actor of Ray", "reward model, an actor of Ray")
OF_ACTORS = (
    "test_the_shape_of_a_verdict",
    "test_a_conversation_that_cannot_be_judged_harms_no_other",
    "test_several_threads_may_ask",
    "test_d25_figures_of_a_batch",
    "test_what_it_says_of_itself",
    "test_tasks_that_could_not_be_judged_are_listed",
)
"""Asked of actors as well, which differ from another case only in where they run. Of the
one that has a state, that this comes and goes too."""

pytestmark = pytest.mark.slow_parameters(*ACTORS)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        asked = metafunc.function.__name__
        actors = ACTORS if asked in OF_ACTORS else ACTORS[-1:] * asked.startswith("test_only_the")
        names = [name for name in MAKERS if name not in ACTORS or name in actors]
        metafunc.parametrize("case", names, indirect=True, scope="module")


@dataclass
class Case:
    """An environment, and conversations with their metadata."""

    environment: Any
    good: list[tuple[list[dict[str, str]], dict[str, Any] | None]]
    """Can be judged; several different rewards among them."""
    bad: tuple[list[dict[str, str]], dict[str, Any] | None]
    """Cannot be judged, whatever else is in the batch."""
    single_turn: bool = True
    is_remote: bool = False
    """What it gives back is a copy."""
    tolerance: float = 0.0
    """By how much a reward may depend on what else is in the batch."""
    bad_tasks: list[Task] = field(default_factory=list)
    """What `validate` rejects. It takes those that the good conversations are of."""


def log(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


class Echo(EnvironmentInterface):
    """A fake of two turns: what was said in the second is worth its length."""

    def step(self, message_log_batch, metadata):
        turns = [sum(m["role"] == "assistant" for m in one) for one in message_log_batch]
        silent = [not one[-1]["content"] for one in message_log_batch]
        lengths = [float(len(one[-1]["content"])) for one in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "And?"} for _ in turns],
            metadata=[
                {**(one or {}), "turn": turn} for one, turn in zip(metadata, turns, strict=True)
            ],
            next_stop_strings=[None for _ in turns],
            rewards=torch.tensor(
                [n if turn > 1 else 0.0 for n, turn in zip(lengths, turns, strict=True)]
            ),
            terminateds=torch.tensor([turn > 1 for turn in turns], dtype=torch.bool),
            failures=["nothing was said" if one else None for one in silent],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"num_samples": float(len(batch["group_ids"]))}


class Plain:
    """Of two methods, as environments of NeMo RL are, derived from nothing."""

    def step(self, message_log_batch, metadata):
        said = [one[-1]["content"] for one in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in said],
            metadata=list(metadata),
            next_stop_strings=[None for _ in said],
            rewards=torch.tensor([float(len(text)) for text in said]),
            terminateds=torch.ones(len(said), dtype=torch.bool),
            failures=[None if text else "nothing was said" for text in said],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"num_samples": float(len(batch["group_ids"]))}


class Demanding(EnvironmentInterface):
    """Takes off the mean of what it has given in the batches before."""

    spec = EnvironmentSpec(judges="completion", has_state=True)

    def __init__(self):
        self._total, self._count = 0.0, 0

    def step(self, message_log_batch, metadata):
        returned = Plain().step(message_log_batch, metadata)
        lengths = returned.rewards.tolist()
        mean = self._total / self._count if self._count else 0.0
        returned.notes = [{"length": length} for length in lengths]
        return returned._replace(rewards=returned.rewards - mean)

    def global_post_process_and_metrics(self, batch):
        return batch, {"longest": max((note["length"] for note in batch["notes"]), default=0.0)}

    def end_batch(self, batch):
        self._total += sum(note["length"] for note in batch["notes"])
        self._count += len(batch["notes"])

    def state_dict(self):
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state):
        self._total, self._count = state["total"], state["count"]


SHORT_AND_LONG = [(log("Hi", "a"), {}), (log("Hi", "abcd"), {"level": 2}), (log("Ho", "ab"), None)]


def plain_case():
    custom = {"plain": {"name": f"{__name__}.Plain"}}
    return Case(
        environment=create_environment("plain", EnvironmentsConfig(custom=custom)),
        good=SHORT_AND_LONG,
        bad=(log("Hi", ""), {}),
    )


GOOD_ANSWERS = [
    (log("1+1?", r"\boxed{2}"), {"ground_truth": "2"}),
    (log("1+1?", r"\boxed{3}"), {"ground_truth": "2"}),
    (log("root?", r"\boxed{\sqrt{12}}"), {"ground_truth": r"2\sqrt{3}"}),
    (log("root?", "It is $x+1$."), {"ground_truth": "1+x"}),
    (log("1+1?", "I do not know"), {"ground_truth": "2"}),
    (log("1+1?", ""), {"ground_truth": "2"}),
]


def bad_task():
    return Task(id="bad", prompt=(Message("user", "1+1?"),), environment="math")


def math_case():
    return Case(
        environment=MathEnvironment({"num_workers": 2}),
        good=GOOD_ANSWERS,
        bad=(log("1+1?", r"\boxed{2}"), {}),
        bad_tasks=[bad_task()],
    )


CHOICE = {"verifier_type": "english_multichoice"}  # needs no processes


def multiple_choice_case():
    answers = ["Answer: A", "Answer: A\nAnswer: B", "B", "Answer: C"]
    return Case(
        environment=MathEnvironment(CHOICE),
        good=[(log("A or B?", answer), {"ground_truth": "B"}) for answer in answers],
        bad=(log("A or B?", "Answer: B"), {"ground_truth": "Berlin"}),
        bad_tasks=[bad_task()],
    )


ADD_ONE = {
    "entry": "f",
    "call_tests": [{"args": [x], "expected": x + 1} for x in (0, 4)],
    "reference_solution": "def f(x): return x + 1",
}
PROGRAMS = ["def f(x): return x + 1", "def f(x): return 1", "def f(x):", "I do not know", ""]


def code_case(**settings):
    """At any tier but the one without a sandbox: what holds of verdicts does not depend on it."""
    settings = {"num_workers": 2, "sandbox": {"min_tier": "D"}} | settings
    unusable = {"call_tests": [{"args": [0], "expected": 1}]}
    return Case(
        environment=CodeEnvironment(settings),
        good=[(log("Add one.", f"```python\n{one}\n```"), ADD_ONE) for one in PROGRAMS],
        bad=(log("Add one.", "def f(x): return x + 1"), unusable),
        bad_tasks=[
            Task(id="bad", prompt=(Message("user", "?"),), environment="code", metadata=unusable)
        ],
    )


def code_tool_case():
    """Its rewards are all 0, so tasks with tests are among them, with several attempts each."""
    case = code_case(max_attempts=2, reward="fraction")
    case.good += [
        (log("1+1?", "<code>1 + 1</code>"), {}),
        (log("1+1?", "<code>x", "And?", "<code>x</code>"), {"code_session": {"blocks": ["x = 3"]}}),
        (log("1+1?", "2"), None),
    ]
    case.single_turn = False
    return case


def remote_code_case():
    case = code_case()
    case.environment.shutdown()
    settings = {"num_workers": 1, "sandbox": {"min_tier": "D"}}
    case.environment = Remote(CodeEnvironment.remote(settings))
    case.is_remote = True
    return case


def hermes(name, **arguments):
    return FORMS["hermes"].write([ToolCall(name, arguments)])


def tools_case():
    """Functions that the policy calls, and multiple choice that scores its answer."""
    config = EnvironmentsConfig(
        tools={
            "functions": [f"tool_functions.{name}" for name in ("add", "die")],
            "graded_by": "math",
            "num_workers": 2,
        },
        math=CHOICE,
    )
    add, known = hermes("add", left=1), {"ground_truth": "B"}
    environment = create_environment("tools", config)
    environment.use_tokenizer(TOKENIZERS["hermes"]())
    return Case(
        environment=environment,
        good=[
            (log("1+1?", add), known),
            (log("1+1?", f"{add} {hermes('add', left='1')} {hermes('what')}<tool_call>"), known),
            (log("1+1?", add, "2", "Answer: B"), known | {"tool_counts": {"answered": 1}}),
            (log("1+1?", "Answer: B"), known),
            (log("1+1?", "Answer: A"), known),
        ],
        bad=(log("1+1?", hermes("die")), known),
        single_turn=False,
        bad_tasks=[bad_task()],
    )


class Brevity(EnvironmentInterface):
    """Shorter is better, and nothing at all is beyond judgement."""

    spec = EnvironmentSpec(judges="completion")

    def step(self, message_log_batch, metadata):
        said = [one[-1]["content"] for one in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in said],
            metadata=list(metadata),
            next_stop_strings=[None for _ in said],
            rewards=torch.tensor([-float(len(text)) for text in said]),
            terminateds=torch.ones(len(said), dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def composite_case(*, gate=None):
    case = multiple_choice_case()
    parts = [{"env": "math", "gate": gate}, {"env": "brevity", "weight": 0.125}]
    case.environment = CompositeEnvironment(
        {"parts": parts, "gated_reward": -4.0}, {"math": case.environment, "brevity": Brevity()}
    )
    return case


def reward_model_case(**transform):
    """Scores are of size 1; what else is in a forest changes their last digits in float32."""
    loaded = small_model()
    scorer = LocalScorer(loaded.model, loaded.contract)
    answers = [
        log("Where?", "By the gate."),
        log("Where?", "In the river, old man."),
        log("Where?", ""),
        log("Bread?", "Wine."),
        log("Bread?", "Wine.", "And?", "Bread."),
        log("Why? " * 60, "No."),
    ]
    return Case(
        environment=RewardModelEnvironment({"transform": transform}, scorer=scorer),
        good=[(one, {"ground_truth": "By the western gate."}) for one in answers],
        bad=(log("Where?"), {}),
        tolerance=1e-5,
        bad_tasks=[bad_task()] if "subtract_reference" in transform else [],
    )


class Remote:
    """An actor of Ray, asked as an environment is."""

    def __init__(self, handle):
        self._handle = handle

    def __getattr__(self, method):
        import ray

        return lambda *args: ray.get(getattr(self._handle, method).remote(*args), timeout=180)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()


def remote_math_case():
    case = math_case()
    case.environment = Remote(MathEnvironment.remote({"num_workers": 2}))
    case.is_remote = True
    return case


def remote_reward_model_case():
    with tempfile.TemporaryDirectory() as directory:
        write_model(small_model(), Path(directory))
        settings = {"model_name": directory, "precision": "float32"}
        case = reward_model_case()
        case.environment = Remote(RewardModelEnvironment.remote(settings, device="cpu"))
        case.is_remote = True
        judge(case, [])  # it has read its files when it answers
    return case


MAKERS: dict[str, Callable[[], Case]] = {
    "fake of two turns": lambda: Case(
        environment=Echo(),
        good=[(log("Hi", "a"), {}), (log("Hi", "a", "And?", "bcd"), {"turn": 1})],
        bad=(log("Hi", ""), {}),
        single_turn=False,
    ),
    "two methods alone": plain_case,
    "with a state": lambda: Case(
        environment=Demanding(), good=SHORT_AND_LONG, bad=(log("Hi", ""), {})
    ),
    "math": math_case,
    "multiple choice": multiple_choice_case,
    "code": code_case,
    "code, as a tool and in several attempts": code_tool_case,
    "tools": tools_case,
    "composite": composite_case,
    "composite, gated": lambda: composite_case(gate=1.0),
    "reward model": reward_model_case,
    "reward model, transformed": lambda: reward_model_case(
        subtract_reference=True, scale=2.0, shift=1.0, clip=[-50.0, 50.0]
    ),
    "reward model, with a state": lambda: reward_model_case(normalize="running"),
    "composite with a state": lambda: Case(
        environment=CompositeEnvironment(
            {"parts": [{"env": "brevity"}, {"env": "demanding", "weight": 3.0}]},
            {"brevity": Brevity(), "demanding": Demanding()},
        ),
        good=SHORT_AND_LONG,
        bad=(log("Hi", ""), {}),
    ),
    "math, an actor of Ray": remote_math_case,
    "code, an actor of Ray": remote_code_case,
    "reward model, an actor of Ray": remote_reward_model_case,
}


def made(name, request):
    if "Ray" in name:
        request.getfixturevalue("small_cluster")
    return MAKERS[name]()


@pytest.fixture(scope="module")
def case(request):
    case = made(request.param, request)
    yield case
    case.environment.shutdown()
    case.environment.shutdown()  # again


def judge(case, pairs):
    return case.environment.step([one for one, _ in pairs], [given for _, given in pairs])


def near(values, case):
    return pytest.approx(values, rel=0, abs=case.tolerance)


def test_the_shape_of_a_verdict(case):
    for size in (0, 1, len(case.good)):
        returned = judge(case, case.good[:size])
        assert isinstance(returned, EnvironmentReturn)
        parts = returned.rewards
        for values in parts.values() if isinstance(parts, dict) else [parts]:
            assert values.shape == (size,)
            assert values.dtype in (torch.float32, torch.float64)
            assert values.isfinite().all()
        assert returned.terminateds.shape == (size,)
        assert returned.terminateds.dtype == torch.bool
        lists = [returned.observations, returned.metadata, returned.next_stop_strings]
        lists += [x for x in (returned.answers, returned.failures) if x is not None]
        assert [len(x) for x in lists] == [size] * len(lists)
        said = [message for o in returned.observations for message in messages_of(o)]
        assert len(said) >= size
        assert all(isinstance(message["role"], str) for message in said)
        assert all(isinstance(message["content"], str) for message in said)
        assert all(failure is None for failure in returned.failures or [])


def test_rewards_tell_good_from_worse(case):
    assert len(set(total(judge(case, case.good)))) > 1


def test_one_by_one_is_as_all_at_once(case):
    together = total(judge(case, case.good))
    alone = [total(judge(case, [pair]))[0] for pair in case.good]
    assert alone == near(together, case)


def test_any_number_of_conversations(case):
    rewards = total(judge(case, case.good))
    pairs, expected = case.good * 17, rewards * 17
    for size in (1, 2, 3, 7, 16, 17):  # fewer and more than workers, even and odd, a power of two
        assert total(judge(case, pairs[:size])) == near(expected[:size], case), size


def test_the_order_changes_nothing(case):
    forwards, backwards = total(judge(case, case.good)), total(judge(case, case.good[::-1]))
    assert backwards[::-1] == near(forwards, case)


def test_a_conversation_that_cannot_be_judged_harms_no_other(case):
    pairs = [case.good[0], case.bad, case.good[1]]
    returned = judge(case, pairs)
    assert [failure is not None for failure in returned.failures] == [False, True, False]
    assert returned.failures[1].strip()
    alone = total(judge(case, [case.good[0], case.good[1]]))
    rewards = total(returned)
    assert [rewards[0], rewards[2]] == near(alone, case)


def test_what_it_was_given_is_not_changed(case):
    pairs = [*case.good, case.bad]
    before = copy.deepcopy(pairs)
    judge(case, pairs)
    assert pairs == before


def test_d8_a_conversation_of_one_turn_is_over(case):
    if case.single_turn:
        assert judge(case, case.good).terminateds.all()
    else:
        assert not judge(case, case.good).terminateds.all()


def test_several_threads_may_ask(case):
    expected = total(judge(case, case.good))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(total(judge(case, case.good))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for rewards in found:
        assert rewards == near(expected, case)


def batch_of(case, pairs):
    returned = judge(case, pairs)
    return environment_batches.batch_of(
        [one for one, _ in pairs],
        returned,
        [f"group {i // 2}" for i in range(len(pairs))],
        is_end=torch.tensor([i != 1 for i in range(len(pairs))], dtype=torch.bool),
        num_failures=2,
    )


def test_d25_figures_of_a_batch(case):
    batch = batch_of(case, case.good)
    before = copy.deepcopy(batch["rewards"])
    same, figures = case.environment.global_post_process_and_metrics(batch)
    assert case.is_remote or same is batch
    assert same.keys() == batch.keys()
    assert torch.equal(same["rewards"], before)
    for name, value in figures.items():
        assert isinstance(name, str)
        assert isinstance(value, float), name
        assert math.isfinite(value), name


def test_figures_of_conversations_that_another_process_judged(case, request):
    """They are computed from the batch alone, whose notes have been in a checkpoint."""
    batch = batch_of(case, case.good)
    _, expected = case.environment.global_post_process_and_metrics(batch)
    batch["notes"] = saved(batch["notes"])
    with made(request.node.callspec.params["case"], request).environment as other:
        _, figures = other.global_post_process_and_metrics(batch)
    assert figures == expected


def saved(value):
    """As it comes back from a checkpoint."""
    return decode(json.loads(json.dumps(encode(value, "x", {}))), {})


def by_content(state):
    """A copied reward model has another name and the same hash."""
    return state | ({"version": content_of(state["version"])} if "version" in state else {})


def test_only_the_end_of_a_batch_changes_its_state(case, request):
    """Where there is none, no other environment is started to have it."""
    name = request.node.callspec.params["case"]
    state = case.environment.state_dict()
    own, other = (made(name, request).environment if state else case.environment for _ in "12")
    asked = Case(environment=own, good=case.good, bad=case.bad)
    before = saved(own.state_dict())
    batch = batch_of(asked, case.good)
    own.global_post_process_and_metrics(batch)
    assert saved(own.state_dict()) == before
    assert total(judge(asked, case.good)) == near(batch["rewards"].tolist(), case)
    own.end_batch(batch)
    after = saved(own.state_dict())
    assert (after != before) == ("with a state" in name)
    other.load_state_dict(after)
    assert by_content(saved(other.state_dict())) == by_content(after)
    rewards = total(judge(Case(environment=other, good=[], bad=case.bad), case.good))
    assert total(judge(asked, case.good)) == near(rewards, case)
    assert (rewards != near(batch["rewards"].tolist(), case)) == ("with a state" in name)
    if state:
        other.shutdown()
        own.shutdown()


def test_what_it_says_of_itself(case):
    if not case.is_remote:  # whoever has a handle says how it is called
        spec = case.environment.spec
        assert isinstance(spec, EnvironmentSpec)
        assert spec == case.environment.spec
        assert bool(case.environment.state_dict()) == spec.has_state
    assert case.environment.noise_floor() >= 0.0


def test_figures_of_an_empty_batch_are_no_numbers_from_nowhere(case):
    _, figures = case.environment.global_post_process_and_metrics(batch_of(case, []))
    assert all(math.isfinite(value) for value in figures.values())
    assert not [name for name in figures if "accuracy" in name or "mean" in name]


def test_tasks_that_could_not_be_judged_are_listed(case):
    good_tasks = [
        Task(id=f"good {i}", prompt=(Message("user", "?"),), environment="e", metadata=given or {})
        for i, (_, given) in enumerate(case.good)
    ]
    rejected = case.environment.validate([*good_tasks, *case.bad_tasks])
    assert {one.task.id for one in rejected} == {task.id for task in case.bad_tasks}
    assert all(one.reason for one in rejected)


@pytest.mark.slow
def test_a_reward_model_in_ranks_beside_its_actor(tmp_path, small_cluster):
    """Their slots are free again, and no process of theirs is left when the actor is killed."""
    write_model(small_model(), tmp_path)
    settings = {"model_name": str(tmp_path), "precision": "float32"}
    logs = [log("Where?", "By the gate."), log("Bread?", "Wine.")]
    with RewardModelEnvironment(settings, device="cpu") as here:
        expected = here.step(logs).rewards.tolist()
    parallel = {**settings, "dtensor_cfg": {"tensor_parallel_size": 2}}
    # Those of earlier tests may take a moment to end.
    others = {*processes("ray::WorkerActor"), *processes("ray::RewardModelEnvironment")}
    handle = RewardModelEnvironment.remote(parallel, device="cpu")
    environment = Remote(handle)
    assert environment.step(logs, [None] * 2).rewards.tolist() == pytest.approx(expected, abs=1e-5)
    ranks = started("ray::WorkerActor", 2, others)
    started("ray::RewardModelEnvironment", 1, others)[0].kill()
    for rank in ranks:
        wait_until(lambda rank=rank: is_gone(rank.pid))
    del environment, handle
    slots = small_cluster.reserve("anybody", 4, Resources(), patience=60)
    slots.release()


def processes(title):
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            if child.cmdline()[:1] == [title]:
                found.append(child)
    return found


def started(title, number, others):
    """So many new ones, which have the title when they have nothing to do."""
    found = []

    def are_there():
        found[:] = [one for one in processes(title) if one not in others]
        return len(found) == number

    wait_until(are_there)
    return found

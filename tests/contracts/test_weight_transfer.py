"""What every way on which weights travel promises, asked of each; then what breaks on the way.

Learner and engines are processes, and what kills them are real signals.
"""

import asyncio
import contextlib
import re
import signal
from functools import partial

import psutil
import pytest
import torch

import learner_work
from laurel.errors import EngineError, WorkerError
from laurel.generation.replicas import GeneratorReplicas
from laurel.generation.weights.held import HeldDtype, as_held
from laurel.generation.weights.routes import SentWeights, WeightTransfer
from laurel.types import Weights
from process_group import ProcessGroup
from weight_workers import Giving, KeepingWorker, every_kind, of

pytestmark = pytest.mark.usefixtures("warm_processes")

BUCKET = 1024
FIRST_HALF = 5
"""A tensor that comes in the middle."""
SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


@pytest.fixture(params=["object_store", "broadcast", "ipc"])
def way(request):
    """Memory of the host stands in for that of a GPU that both have open."""
    return request.param


@pytest.fixture(params=["object_store", "broadcast"])
def way_without_gpus(request):
    return request.param


class Playing:
    """A generator of two engines, with all that a test looks at."""

    def __init__(self, way, learner, *, patience=60.0, count=2, **options):
        self.learner, self.groups, self.said = learner, {}, []
        self.generator = GeneratorReplicas(
            self.make,
            count,
            transfer=WeightTransfer(name=way, bucket_bytes=BUCKET),
            patience=patience,
            say=self.said.append,
            **options,
        )

    def make(self, index):
        self.groups[index] = ProcessGroup("generation", 1, KeepingWorker)
        return self.groups[index]

    def give(self, version, *, is_partly_frozen=False):
        self.learner.call("learn", version)
        self.update(
            SentWeights(
                version=version,
                tensors=partial(of, version),
                changing=partial(of, version, True) if is_partly_frozen else None,
                sender=self.learner,
            )
        )

    def update(self, weights):
        asyncio.run(asyncio.wait_for(self.generator.update_weights(weights), 60))

    def ask(self, method="kept"):
        return [self.groups[index].call_one(0, method) for index in sorted(self.groups)]

    def require(self, version, expected=None):
        """Every engine has these weights, bit for bit."""
        expected = every_kind(version) if expected is None else expected
        assert self.generator.weight_version == version
        for found, _, kept in self.ask():
            assert found == version
            assert list(kept) == list(expected)
            for name, tensor in expected.items():
                assert (kept[name].dtype, kept[name].shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(kept[name], tensor), name


@pytest.fixture
def play():
    with contextlib.ExitStack() as stack:

        def start(way, *, learner=None, given=None, **options):
            if learner is None:
                learner = ProcessGroup("policy", 1, Giving, **(given or {}))
                stack.callback(learner.shutdown)
            playing = Playing(way, learner, **options)
            stack.callback(playing.generator.close)
            return playing

        yield start


def test_what_arrives_is_what_was_sent(play, way):
    """Of all dtypes and shapes; twice, by processes that know each other the second time."""
    playing = play(way)
    for version in (1, 2):
        playing.give(version)
        playing.require(version)
    assert playing.said == []
    assert playing.generator.num_weight_fallbacks == 0


def test_weights_travel_in_the_dtype_that_the_engines_hold(play, way):
    """Rounded once, as a copy of an engine rounds; if engines differ, as they are."""
    playing = play(way)
    held = HeldDtype("bfloat16", frozenset({"large"}))
    for group in playing.groups.values():
        group.call("expect", held_dtype=held)
    playing.give(1)
    expected = dict(as_held(every_kind(1).items(), held))
    assert {name: expected[name].dtype for name in ("small", "large", "counts")} == {
        "small": torch.bfloat16,
        "large": torch.float32,
        "counts": torch.int64,
    }
    playing.require(1, expected)
    playing.groups[0].call("expect", held_dtype=None)
    playing.give(2)
    playing.require(2)


def test_only_what_changes_travels_to_who_has_the_rest(play, way):
    playing = play(way)
    playing.give(1, is_partly_frozen=True)
    playing.give(2, is_partly_frozen=True)
    for version, came, kept in playing.ask():
        assert (version, came) == (2, ["half", "large"])
        assert all(torch.equal(kept[name], every_kind(2)[name]) for name in came)
        assert torch.equal(kept["small"], every_kind(1)["small"])


@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 2}], ids=["alone", "dp"])
def test_a_learner_of_any_mesh(play, way_without_gpus, sizes, tmp_path):
    """Its own weights are those of one process; tied ones come once."""
    name = "qwen3" if sizes else "qwen3-tied"
    directory = learner_work.write("policy", tmp_path, name)
    group = partial(ProcessGroup, "policy", max(1, *sizes.values(), 1))
    learner = learner_work.grouped("policy", directory, group, sizes)
    with learner.group:
        playing = play(way_without_gpus, learner=learner.group)
        playing.update(learner.weights(3))
        expected = learner_work.weights_of(learner_work.local("policy", directory))
        assert ("lm_head.weight" in expected) == bool(sizes)
        playing.require(3, expected)


def test_of_adapters_only_what_they_change(play, tmp_path):
    pytest.importorskip("peft")
    directory = learner_work.write("policy", tmp_path)
    changes = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}
    learner = learner_work.grouped(
        "policy", directory, partial(ProcessGroup, "policy", 2), {"dp_shard": 2}, **changes
    )
    with learner.group:
        playing = play("object_store", learner=learner.group)
        playing.update(learner.weights(1))
        batch = learner_work.micro_batches("policy", [[0], [1, 2], [3]])
        learner.update(batch, learner_work.loss("policy"))
        playing.update(learner.weights(2))
        expected = learner_work.weights_of(learner)
        playing.require(2, expected)
        for _, came, _ in playing.ask():
            assert "model.embed_tokens.weight" not in came
            assert "model.layers.1.mlp.up_proj.weight" in came


@pytest.mark.slow_parameters("object_store-hung", "broadcast-hung", "ipc-hung")
@pytest.mark.parametrize("fate", SIGNALS)
def test_an_engine_that_is_lost_in_the_middle(play, way, fate):
    """It is named and started again, and all have the weights in the end, as next time."""
    playing = play(way, patience=10.0)
    playing.give(1)
    victim = playing.groups[1]
    (pid,) = victim.call("pid")
    victim.call("expect", fate=(FIRST_HALF, SIGNALS[fate]))
    playing.give(2)
    playing.require(2)
    assert playing.groups[1] is not victim
    assert not psutil.pid_exists(pid)
    assert any("generation replica 1 was lost" in line for line in playing.said)
    playing.give(3)
    playing.require(3)
    broken = [line for line in playing.said if "broke off" in line]
    assert len(broken) == playing.generator.num_weight_fallbacks <= (way == "broadcast")


def test_an_engine_that_refuses_is_believed(play, way):
    playing = play(way, patience=10.0)
    playing.groups[0].call("expect", refuses="large")
    with pytest.raises(EngineError, match="generation replica 0: it has no large"):
        playing.give(1)


def test_a_learner_that_dies_ends_the_run(play, way):
    playing = play(way, patience=5.0)
    playing.give(1)
    psutil.Process(playing.learner.call("pid")[0]).kill()
    with pytest.raises(WorkerError, match="policy rank 0") as raised:
        playing.give(2)
    assert raised.value.is_lost


def test_a_broadcast_that_breaks_ends_through_rays_store(play):
    """Who has had some tensors goes on with the rest, and the next one is a broadcast again."""
    playing = play("broadcast", patience=5.0, count=3)
    playing.groups[2].call("expect", fate=(FIRST_HALF, signal.SIGKILL))
    asked = [listened(group) for index, group in playing.groups.items() if index != 2]
    playing.give(1)
    playing.require(1)
    assert playing.generator.num_weight_fallbacks == 1
    assert "of the weights of step 1 broke off (generation replica 2 was lost)" in playing.said[0]
    assert "all later ones" not in playing.said[0]
    assert all({"repeat_weights", "take_weights"} <= set(calls) for calls in asked)
    for calls in asked:
        calls.clear()
    playing.give(2)
    playing.require(2)
    assert all("receive_weights" in calls and "take_weights" not in calls for calls in asked)
    assert playing.generator.num_weight_fallbacks == 1


def listened(group):
    """The methods that a group is asked for from now on."""
    calls, submit = [], group._submit

    def listening(asked):
        calls.append(asked[0].method)
        return submit(asked)

    group._submit = listening
    return calls


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"host": "192.0.2.77"}, r"no port can be bound at 192\.0\.2\.77"),
        ({"takes_port": True}, "in invite: .*address already in use"),
    ],
    ids=["an address of nobody", "a port in use"],
)
def test_a_meeting_that_cannot_be_is_tried_once(play, given, why):
    playing = play("broadcast", given=given)
    for version in (1, 2):
        playing.give(version)
        playing.require(version)
    assert playing.generator.num_weight_fallbacks == 1
    (said,) = playing.said
    assert re.search(why, said)
    assert said.endswith("through Ray's object store, and all later ones too")


def test_an_engine_on_another_gpu_gets_its_weights_through_rays_store(play):
    playing = play("ipc")
    playing.groups[1].call("see_no_gpu")
    for version in (1, 2):
        playing.give(version)
        playing.require(version)
    assert playing.generator.num_weight_fallbacks == 1
    (said,) = playing.said
    assert "no process of the learner shares a GPU with this engine" in said
    assert "GPU-1" in said
    assert said.endswith("through Ray's object store, and all later ones too")


@pytest.mark.parametrize("ends", ["well", "refused", "by another way"])
def test_shared_memory_is_closed_however_a_transfer_ends(play, ends):
    playing = play("ipc")
    if ends == "refused":
        playing.groups[0].call("expect", refuses="small")
    if ends == "by another way":
        playing.groups[1].call("see_no_gpu")
    with pytest.raises(EngineError) if ends == "refused" else contextlib.nullcontext():
        playing.give(1)
    everybody = (playing.learner, *playing.groups.values())
    assert [one.call_one(0, "shared_blocks") for one in everybody] == [0, 0, 0]


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_weights_that_nobody_can_send(play, way):
    playing = play(way)
    with pytest.raises(TypeError, match="only the weights of a LearnerGroup"):
        playing.update(Weights(version=1, tensors=partial(of, 1)))

"""A worker that holds an engine, called as a group would call it."""

import contextlib
import pickle
import threading
import time

import pytest
import torch

from generators import request
from laurel.errors import ConfigError, DataError, EngineError
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.weights.buckets import pack_tensor
from laurel.workers.rendezvous import RankPlace
from scripted_engines import ScriptedEngine


@contextlib.contextmanager
def working(engine):
    worker = EngineWorker(RankPlace(role="generation"), lambda: engine)
    try:
        yield worker
    finally:
        worker.shutdown()


def events_of(worker, count, new=(), aborted=()):
    """The next so many events, as (number, completion's index, None or the error)."""
    events = worker.exchange(new, aborted, [], 0.0)
    deadline = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline
        events += worker.exchange([], [], [], 0.2)
    return [(e.number, getattr(e.what, "index", e.what)) for e in events]


def test_it_waits_no_longer_than_it_may_and_no_longer_than_it_must():
    engine = ScriptedEngine(allowed=0)
    with working(engine) as worker:
        started = time.monotonic()
        assert worker.exchange([(1, request(seeds=(5,)))], [], [], 0.2) == []
        assert 0.2 <= time.monotonic() - started < 10
        threading.Timer(0.1, setattr, (engine, "allowed", 1)).start()
        started = time.monotonic()
        assert len(worker.exchange([], [], [], 30.0)) >= 1
        assert time.monotonic() - started < 25


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (DataError("request 'r': no token"), DataError, "no token"),
        (EngineError("vLLM died"), EngineError, "vLLM died"),
        (RuntimeError("CUDA"), EngineError, "the engine failed: RuntimeError: CUDA"),
    ],
)
def test_why_a_request_failed_can_travel(error, kind, says):
    engine = ScriptedEngine()
    engine.failure = error
    with working(engine) as worker:
        ((number, found),) = events_of(worker, 1, new=[(3, request())])
        assert number == 3
        travelled = pickle.loads(pickle.dumps(found))
        assert type(travelled) is kind
        assert says in str(travelled)
        engine.failure = None
        assert len(events_of(worker, 2, new=[(4, request(seeds=(1,)))])) == 2


def test_an_engine_that_cannot_be_made_says_why():
    def make():
        raise ConfigError("no GPU")

    before = threading.active_count()
    with pytest.raises(ConfigError, match="no GPU"):
        EngineWorker(RankPlace(role="generation"), make)
    assert threading.active_count() == before


def test_weights_come_in_buckets_and_are_taken_when_they_end():
    engine = ScriptedEngine()
    with working(engine) as worker:
        worker.begin_weights(3)
        worker.take_weights([pack_tensor("x", torch.ones(2))])  # this transfer breaks off
        worker.begin_weights(4)
        worker.take_weights([pack_tensor("a", torch.ones(2))])
        worker.take_weights([pack_tensor("b", torch.zeros(1)), pack_tensor("c", torch.ones(1))])
        assert worker.weight_version() == 0
        assert worker.end_weights() == 4
        assert sorted(engine.weights) == ["a", "b", "c"]
        assert engine.weights["a"].tolist() == [1.0, 1.0]
        assert worker.answer_probe() is None
        with pytest.raises(EngineError, match="without a beginning"):
            worker.take_weights([])


def test_it_can_be_shut_down_in_the_middle_of_everything():
    engine = ScriptedEngine(allowed=0)
    worker = EngineWorker(RankPlace(role="generation"), lambda: engine)
    worker.exchange([(1, request())], [], [], 0.0)
    worker.begin_weights(4)
    worker.take_weights([pack_tensor("a", torch.ones(2))])
    waiting = threading.Thread(target=worker.exchange, args=([], [], [], 60.0), daemon=True)
    waiting.start()
    worker.shutdown()
    worker.shutdown()
    assert engine.is_closed
    assert engine.num_open == 0
    waiting.join(50)
    assert not waiting.is_alive()

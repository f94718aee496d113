"""Weights in buckets, and the stream that an engine reads while they come."""

import pickle
import threading

import pytest
import torch

from laurel.errors import EngineError
from laurel.generation.weights.buckets import WeightStream, buckets_of, pack_tensor, unpack

SHARED = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(3).bfloat16(),
        torch.randn(2, 2).half(),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.arange(5),
        torch.tensor([True, False]),
        SHARED[1],
        SHARED.T,
        torch.nn.Parameter(torch.randn(2, 2)),
    ],
)
@pytest.mark.parametrize("travels", [False, True])
def test_a_tensor_arrives_as_it_is(tensor, travels):
    packed = pack_tensor("a", tensor)
    if travels:
        packed = pickle.loads(pickle.dumps(packed))
    found = unpack(packed)
    assert packed.name == "a"
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor.detach())


def test_a_view_travels_without_what_it_is_a_view_of():
    whole = torch.zeros(1_000_000)
    assert len(pickle.dumps(pack_tensor("a", whole[:10]))) < 1000


def test_bytes_that_may_not_be_written_are_copied():
    packed = pack_tensor("a", torch.ones(3))
    values = packed.values.copy()
    values.flags.writeable = False
    assert unpack(packed._replace(values=values)).tolist() == [1.0, 1.0, 1.0]


def test_buckets_are_bounded_and_in_order():
    sent = {
        "a": torch.zeros(10),  # 40 bytes
        "b": torch.zeros(5),  # 20
        "c": torch.zeros(100),  # 400: larger than a bucket
        "d": torch.zeros(0),
        "e": torch.zeros(15),  # 60
        "f": torch.zeros(1),
    }
    found = list(buckets_of(sent.items(), max_bytes=60))
    assert [[packed.name for packed in bucket] for bucket in found] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
        ["f"],
    ]
    assert list(buckets_of([], max_bytes=60)) == []


def test_a_bucket_is_made_when_it_is_asked_for():
    made = []

    def tensors():
        for name in "abcd":
            made.append(name)
            yield name, torch.zeros(1)

    buckets = buckets_of(tensors(), max_bytes=4)
    next(buckets)
    assert made == ["a", "b"], "one tensor more shows that the bucket is full"


def bucket_of(name):
    return [pack_tensor(name, torch.ones(2))]


def started(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_who_puts_waits_until_the_bucket_before_is_being_read():
    stream = WeightStream(4)
    assert stream.weights.version == 4
    stream.put(bucket_of("a"))
    waiting = started(stream.put, bucket_of("b"))
    waiting.join(0.05)
    assert waiting.is_alive()
    tensors = iter(stream.weights.tensors())
    assert next(tensors)[0] == "a"
    waiting.join(60)
    assert not waiting.is_alive()
    assert next(tensors)[0] == "b"
    stream.complete()
    assert list(tensors) == []


def test_who_reads_waits_for_the_next_bucket():
    stream = WeightStream(4)
    found = []
    reader = started(lambda: found.extend(name for name, _ in stream.weights.tensors()))
    stream.put(bucket_of("a"))
    stream.put(bucket_of("b"))
    reader.join(0.05)
    assert reader.is_alive()
    stream.complete()
    reader.join(60)
    assert found == ["a", "b"]


def test_those_that_change_do_not_pass_for_all():
    stream = WeightStream(4, changing_only=True)
    stream.put(bucket_of("a"))
    stream.complete()
    with pytest.raises(EngineError, match="without those that do not change"):
        stream.weights.tensors()
    assert [name for name, _ in stream.weights.changing()] == ["a"]
    assert WeightStream(4).weights.changing is None


def test_a_stream_that_is_cut_says_so():
    stream = WeightStream(4)
    stream.put(bucket_of("a"))
    waiting = started(stream.put, bucket_of("b"))
    stream.cut(EngineError("the engine was closed"))
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(EngineError, match="closed"):
        list(stream.weights.tensors())


def test_nobody_waits_for_a_reader_that_has_gone():
    stream = WeightStream(4)
    stream.put(bucket_of("a"))
    waiting = started(stream.put, bucket_of("b"))
    stream.leave()
    waiting.join(60)
    assert not waiting.is_alive()
    stream.put(bucket_of("c"))


def test_what_comes_again_is_not_read_again():
    """However the buckets are cut the second time; and a third time, which begins too early."""
    stream = WeightStream(3)
    read = []
    reader = threading.Thread(target=lambda: read.extend(stream.weights.tensors()))
    reader.start()
    parts = [pack_tensor(name, torch.tensor([float(i)])) for i, name in enumerate("abcde")]
    stream.put(parts[:2])
    stream.put(parts[2:3])
    stream.repeat()
    stream.put(parts[:1])
    stream.repeat()
    stream.put(parts[:4])
    stream.put(parts[4:])
    stream.complete()
    reader.join(60)
    assert [(name, tensor.item()) for name, tensor in read] == list(
        zip("abcde", range(5), strict=True)
    )

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
        torch.randn(3).bfloat16(),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.zeros(1_000_000)[:10],
        SHARED.T,
        torch.nn.Parameter(torch.randn(2, 2)),
    ],
)
def test_a_tensor_arrives_as_it_is(tensor):
    packed = pack_tensor("a", tensor)
    data = pickle.dumps(packed)
    assert len(data) < 1000, "a view travels without what it is a view of"
    for found in (packed, pickle.loads(data)):
        assert found.name == "a"
        arrived = unpack(found)
        assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(arrived, tensor.detach())


def test_bytes_that_may_not_be_written_are_copied():
    packed = pack_tensor("a", torch.ones(3))
    values = packed.values.copy()
    values.flags.writeable = False
    assert unpack(packed._replace(values=values)).tolist() == [1.0, 1.0, 1.0]


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


def test_those_that_change_do_not_pass_for_all():
    stream = WeightStream(4, changing_only=True)
    stream.put(bucket_of("a"))
    stream.complete()
    with pytest.raises(EngineError, match="without those that do not change"):
        stream.weights.tensors()
    assert [name for name, _ in stream.weights.changing()] == ["a"]
    assert WeightStream(4).weights.changing is None


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


@pytest.mark.parametrize("ends", ["cut", "left"])
def test_nobody_waits_for_a_reader_that_has_gone(ends):
    stream = WeightStream(4)
    stream.put(bucket_of("a"))
    waiting = started(stream.put, bucket_of("b"))
    if ends == "left":
        stream.leave()
    else:
        stream.cut(EngineError("the engine was closed"))
    waiting.join(60)
    assert not waiting.is_alive()
    if ends == "left":
        stream.put(bucket_of("c"))
    else:
        with pytest.raises(EngineError, match="closed"):
            list(stream.weights.tensors())


def test_buckets_are_bounded_in_order_and_made_when_they_are_asked_for():
    sent = {
        "a": torch.zeros(10),  # 40 bytes
        "b": torch.zeros(5),  # 20
        "c": torch.zeros(100),  # 400: larger than a bucket
        "d": torch.zeros(0),
        "e": torch.zeros(15),  # 60
        "f": torch.zeros(1),
    }
    made = []

    def tensors():
        for name, tensor in sent.items():
            made.append(name)
            yield name, tensor

    buckets = buckets_of(tensors(), max_bytes=60)
    found = [next(buckets)]
    assert made == ["a", "b", "c"], "one tensor more shows that the bucket is full"
    found += buckets
    assert [[packed.name for packed in bucket] for bucket in found] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
        ["f"],
    ]
    assert list(buckets_of([], max_bytes=60)) == []

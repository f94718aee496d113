"""Buckets in memory that other processes can read; between processes: tests/contracts."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.errors import BroadcastError
from laurel.generation.weights.buckets import unpack
from laurel.generation.weights.shared_memory import Lender, SharedBucket, borrowed, reach_of
from weight_workers import every_kind


def buckets_of(lender):
    while (shared := lender.next()) is not None:
        yield shared


def weights_of(sizes):
    return [(f"{i}", torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate(sizes)]


def test_every_kind_of_tensor():
    lender = Lender(every_kind(1).items(), max_bytes=1024, device="cpu")
    found = {part.name: unpack(part) for shared in buckets_of(lender) for part in borrowed(shared)}
    lender.close()
    assert list(found) == list(every_kind(1))
    for name, tensor in every_kind(1).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 300))
def test_every_rank_cuts_where_the_others_do(sizes, most):
    """Who keeps nothing has gathered the same weights after each bucket as who lends."""
    taken = ([], [])

    def gathered(which):
        for name, tensor in weights_of(sizes):
            taken[which].append(name)
            yield name, tensor

    lending = Lender(gathered(0), max_bytes=most, device="cpu")
    silent = Lender(gathered(1), max_bytes=most, device=None)
    names = []
    for shared in buckets_of(lending):
        assert silent.next() is None
        assert taken[0] == taken[1]
        parts = borrowed(shared)
        assert len(parts) == 1 or shared.num_bytes <= most
        names += [part.name for part in parts]
        for part in parts:
            assert unpack(part).tolist() == [int(part.name)] * sizes[int(part.name)]
    lending.close()
    assert names == [name for name, _ in weights_of(sizes)]


def test_the_bucket_before_stays_while_the_next_is_made():
    lender = Lender(iter(weights_of([8, 8, 8, 8])), max_bytes=8, device="cpu")
    first, second = lender.next(), lender.next()
    assert [borrowed(shared)[0].values.tolist() for shared in (first, second)] == [[0] * 8, [1] * 8]
    third = lender.next()
    assert third.lender == first.lender, "two pieces of memory are all there is"
    assert borrowed(second)[0].values.tolist() == [1] * 8
    lender.close()


def test_memory_that_is_gone_is_told():
    lender = Lender(iter(weights_of([8])), max_bytes=8, device="cpu")
    shared = lender.next()
    lender.close()
    with pytest.raises(BroadcastError, match="learner's memory cannot be read: FileNotFound"):
        borrowed(shared)
    short = Lender(iter(weights_of([8])), max_bytes=8, device="cpu")
    told = short.next()
    more = SharedBucket(lender=told.lender, handle=None, table=told.table, num_bytes=1 << 20)
    with pytest.raises(BroadcastError, match="cannot be read: ValueError"):
        borrowed(more)
    short.close()


def test_processes_of_one_machine_reach_each_other(monkeypatch):
    assert reach_of("cpu").name == reach_of("cpu").name is not None
    monkeypatch.delattr(os, "memfd_create")
    assert reach_of("cpu").name is None
    assert "Linux" in reach_of("cpu").why_not

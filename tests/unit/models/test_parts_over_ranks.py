"""Ranks that compute groups in parts give what one process gives in one pass."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parts_work
import threads
from laurel.models.forest.lockstep import BACKWARD, FORWARD, common_order
from parallel_runs import together

CASES = {
    "dp_shard=2": [("sft", "qwen3-tied", {"recomputes": True, "lora": True})],
    "dp_shard=2 cp=2": [("sequences", "gpt-oss", {}), ("pairs", "llama", {"lora": True})],
    "dp_shard=2 tp=2": [("sequences", "qwen3", {"shares_tokens": True, "recomputes": True})],
}
pytestmark = pytest.mark.slow_parameters("dp_shard=2 cp=2", "dp_shard=2 tp=2")
one_thread_of_module = threads.one_thread_of_module


@pytest.mark.parametrize("sizes", CASES)
def test_parts_over_ranks_are_one_pass_of_one_process(sizes):
    """Of two ranks of the data one has a tree in parts, the other fewer, or a filler.

    Some losses compute in float32.
    """
    cases = CASES[sizes]
    mesh = {name: int(size) for name, size in (one.split("=") for one in sizes.split())}
    alone = parts_work.computed(None, cases, None)
    ranks = together(parts_work.computed, math.prod(mesh.values()), mesh, cases, 12)
    for case, wanted in enumerate(alone):
        assert any(any(rank[case]["in parts"]) for rank in ranks)
        assert not any(wanted["in parts"])
        for found in (rank[case] for rank in ranks):
            outputs, expected = found["outputs"]
            torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-11)
            assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
            assert found["gradients"].keys() == wanted["gradients"].keys()
            for name, gradient in wanted["gradients"].items():
                error = (found["gradients"][name] - gradient).norm()
                assert error <= 1e-6 * gradient.norm() + 1e-12, name
        losses = sum(ranks[rank][case]["loss"] for rank in range(0, len(ranks), _each(mesh)))
        assert losses == pytest.approx(wanted["loss"], rel=1e-6)


def _each(mesh):
    return mesh.get("tp", 1) * mesh.get("cp", 1)


@given(st.lists(st.text(FORWARD + BACKWARD, max_size=12), min_size=1, max_size=5))
def test_the_common_order_has_the_passes_of_every_rank(orders):
    common = common_order(orders)
    for order in orders:
        left = iter(common)
        assert all(kind in left for kind in order)
    assert len(common) <= sum(map(len, orders))
    assert common_order([common, *orders]) == common
    assert common_order(orders[:1]) == orders[0]


def test_the_common_order_by_hand():
    assert common_order(["fbbb", "fbb"]) == "fbbb"
    assert common_order(["bb", "fbfb"]) == "fbfb"
    assert common_order(["", "b"]) == "b"

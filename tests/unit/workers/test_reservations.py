"""What fits into a cluster, and what is said when it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.workers.reservations import NodeState, Resources, refusal, room, shortfall

ONE_GPU = Resources(cpus=1, gpus=1)


def test_room_is_what_the_scarcest_resource_leaves():
    assert room(ONE_GPU, {"CPU": 8, "GPU": 2}) == 2
    assert room(Resources(cpus=3), {"CPU": 8, "GPU": 2}) == 2
    assert room(ONE_GPU, {"CPU": 8}) == 0
    assert room(Resources(cpus=0.1), {"CPU": 0.3}) == 3, "as exact as the cluster counts"
    assert room(Resources(cpus=0, others={"fast": 2}), {"fast": 5, "CPU": 1}) == 2


@given(st.integers(1, 6), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_fits_exactly_where_each_worker_finds_a_slot(workers, rooms):
    fits_anywhere = shortfall(workers, ONE_GPU, rooms) is None
    assert fits_anywhere == (len([slot for n in rooms for slot in range(n)]) >= workers)
    for index, count in enumerate(rooms):
        fits_there = shortfall(workers, ONE_GPU, rooms, nodes=[index] * workers) is None
        assert fits_there == (workers <= count)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "there is room for 3"),
        ({"nodes": [0, 1, 1, 0]}, "2 are to be on node 1, which has room for 1"),
        ({"nodes": [0, 0, 1, 2]}, "node 2 does not exist: there are 2"),
        ({"nodes": [0, 0, 1, -1]}, "node -1 does not exist: there are 2"),
    ],
)
def test_why_it_does_not_fit(options, why):
    assert shortfall(4, ONE_GPU, [2, 1], **options) == why


def test_a_refusal_says_what_is_free_and_who_has_the_rest():
    states = [
        NodeState(
            id="a",
            address="10.0.0.1",
            total={"CPU": 8, "GPU": 4, "memory": 1e9},
            free={"CPU": 2, "GPU": 1},
            held={"policy": {"CPU": 2, "GPU": 2}, "judge": {"CPU": 1, "GPU": 1}},
        ),
        NodeState(id="b", address="10.0.0.2", total={"CPU": 8}, free={"CPU": 8}),
    ]
    text = refusal("generation", 2, ONE_GPU, states, "there is room for 1", busy=True)
    # Of 8 CPU 2 are free and 3 are held by name: 3 are held by others. Of 4 GPU none are.
    assert text.splitlines() == [
        "cannot reserve 2 x (1 CPU, 1 GPU) for generation: there is room for 1 now.",
        "  node 0 (10.0.0.1): 2 of 8 CPU, 1 of 4 GPU free; "
        "held by judge (1 CPU, 1 GPU), policy (2 CPU, 2 GPU), others (3 CPU)",
        "  node 1 (10.0.0.2): 8 of 8 CPU, 0 of 0 GPU free",
        "Ask for less (cluster.gpus_per_node, cluster.num_nodes), or end what holds them, "
        "or wait for it.",
    ]
    empty = refusal("policy", 9, ONE_GPU, states, "there is room for 4", busy=False)
    assert "there is room for 4 even on the empty cluster." in empty
    assert empty.endswith("or add nodes.")

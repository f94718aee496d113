"""How ranks find each other."""

import os
import socket

import pytest

from laurel.errors import ConfigError
from laurel.workers.rendezvous import RankPlace, bind_master, join, leave


def test_a_bound_port_is_nobody_elses():
    port, descriptor = bind_master()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert bind_master()[0] != port
    finally:
        os.close(descriptor)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_an_address_of_another_machine():
    with pytest.raises(ConfigError, match=r"no port can be bound at 192\.0\.2\.77"):
        bind_master("192.0.2.77")


def test_the_variables_of_torchrun():
    place = RankPlace(role="policy", rank=3, world_size=4, local_rank=1, master_port=5)
    assert place.environment() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5",
    }


def test_a_world_of_one_meets_nobody():
    import torch
    import torch.distributed as dist

    leave()  # harmless where nobody has joined
    join(RankPlace(role="policy"))
    try:
        tensor_K = torch.ones(2)
        dist.all_reduce(tensor_K)
        assert tensor_K.tolist() == [1.0, 1.0]
        assert "MASTER_PORT" not in os.environ
    finally:
        leave()
    assert not dist.is_initialized()
    leave()

"""Weights told by one process to another, on a CPU; tests/gpu does the same between GPUs."""

import torch

from parallel_runs import together
from weight_workers import every_kind, told


def test_what_is_heard_is_what_was_told():
    _, heard = together(told, 2, "cpu")
    assert [name for name, _ in heard] == list(every_kind(1))
    for name, tensor in heard:
        assert tensor.dtype == every_kind(1)[name].dtype
        assert torch.equal(tensor, every_kind(1)[name])

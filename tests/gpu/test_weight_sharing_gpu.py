"""Weights that another process reads from the memory of a GPU that both have (CUDA IPC)."""

import pytest
import torch

from parallel_runs import together
from weight_workers import every_kind, shared_on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def test_what_is_read_is_what_was_lent():
    _, read = together(shared_on_gpu, 2)
    assert [name for name, _ in read] == list(every_kind(1))
    for name, tensor in read:
        assert tensor.dtype == every_kind(1)[name].dtype
        assert torch.equal(tensor, every_kind(1)[name])

"""Weights told from GPU to GPU by NCCL, which wants one for each process."""

import pytest
import torch

from parallel_runs import together
from weight_workers import every_kind, told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no two GPUs here"),
]


def test_what_is_heard_is_what_was_told():
    _, heard = together(told, 2, "cuda")
    for name, tensor in heard:
        assert torch.equal(tensor, every_kind(1)[name])
    assert len(heard) == len(every_kind(1))

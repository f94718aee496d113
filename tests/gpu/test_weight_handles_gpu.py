"""Weights in memory of a GPU that two processes have open."""

import pytest
import torch

from laurel.generation.weights.held import HeldDtype, as_held
from process_group import ProcessGroup
from weight_workers import GivingOnGpu, OpeningOnGpu, every_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def test_another_process_reads_a_chunk():
    """Twice, each time from memory of its own; as large a weight as a block, and a larger one."""
    held = HeldDtype("bfloat16")
    expected = dict(as_held(every_kind(1).items(), held))
    with (
        ProcessGroup("policy", 1, GivingOnGpu) as learner,
        ProcessGroup("generation", 1, OpeningOnGpu) as engine,
    ):
        learner.call("learn", 1)
        before = learner.call("allocated")
        for _ in range(2):
            found = {}
            learner.call("open_handles", False, held, 1024)
            while (chunk := learner.call("next_handles")[0]) is not None:
                found |= engine.call("copied", chunk)[0]
            engine.call("close")
            learner.call("close_handles")
            assert list(found) == list(expected)
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name], tensor), name
        # A block that nobody opens is given back as well.
        learner.call("open_handles", False, held, 1024)
        assert learner.call("next_handles")[0] is not None
        learner.call("close_handles")
        assert learner.call("allocated") == before

"""How often what runs on a GPU is compiled: seen on a CPU, with the compiler's front end alone."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

import tiny
from laurel.data.forest import to_forest
from laurel.models.forest import attention

# The compiler warns of what it looks at; a run does not make errors of that.
pytestmark = pytest.mark.filterwarnings("default")

FORESTS = (
    [(40, [5, 1, 30]), (3, [2, 2])],
    [(50, [7, 7, 7, 9])],
    [(17, [3, 9, 1, 25]), (8, [2, 3])],
    [(4, [2, 1])],
)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """FlexAttention computes all that CUDA's flash kernels cannot; nothing is left of it after."""
    compile_front = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_front)
    monkeypatch.setattr(attention, "_is_gpu", lambda tensor: True)
    monkeypatch.setattr(attention, "_suits_cascade", lambda *inputs: False)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    counters.clear()
    attention.compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()
    attention.compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("gemma2", 12), ("gpt-oss", 12)])
def test_variants_do_not_grow_with_the_forests_and_stay_below_the_limit(name, most, as_on_a_gpu):
    """Training and log-probabilities, of fixed lengths and then of any: two windows make twice."""
    policy = tiny.tiny_policy(name, std=0.05, head_dim=16)
    seen = []
    for seed, shapes in enumerate(FORESTS):
        forest = to_forest(tiny.random_groups(seed, shapes))
        out = policy(forest).logprobs_M
        out.sum().backward()
        # The learner's, and a generator's or scorer's on a GPU.
        torch.testing.assert_close(policy.logprobs(forest), out.detach(), rtol=0, atol=1e-5)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[-1] == seen[-2] <= most < attention.VARIANTS
    assert not counters["graph_break"]


def test_a_variant_too_many_is_an_error_and_not_a_slow_run(as_on_a_gpu):
    kernel = attention.compiled(torch.square)
    kernel(torch.ones(2, dtype=torch.float32))
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit),
    ):
        kernel(torch.ones(2, dtype=torch.float64))

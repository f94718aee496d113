"""Compiled layers compute what the others do, and forests do not compile them again and again.

The compiler's front end alone (`aot_eager`) decides that; one test has the whole compiler.
"""

import copy
import shutil
from contextlib import closing

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AttentionInterface

import parallel_work
import tiny
import tiny_tokenizers
from generators import draw, full_logprobs, request
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.attention import FOREST, forest_attention, register
from laurel.models.forest.compiled import compile_layers
from laurel.models.loading import pretrained
from laurel.models.loading.adapters import add_adapters
from laurel.models.loading.pretrained import chooses_to_compile, recompute_activations
from parallel_runs import together

# The compiler warns of what it looks at; a run does not make errors of that.
pytestmark = pytest.mark.filterwarnings("default")

FORESTS = (
    [(40, [5, 1, 30]), (3, [2, 2])],
    [(50, [7, 7, 7, 9])],
    [(17, [3, 9, 1, 25]), (8, [2, 3])],
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    AttentionInterface.register(FOREST, forest_attention)


def forest(number):
    return to_forest(tiny.random_groups(number, FORESTS[number]))


def graphs():
    return counters["stats"]["unique_graphs"]


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def nearly(found, expected):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        noise = (one - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        assert noise <= 1e-5, name


def equal(policy, plain, number, *, trains=True):
    """Compare the log-probabilities, and in training the gradients, of one forest."""
    for model in (plain, policy) if trains else ():
        model.train()
        model.zero_grad()
        model(forest(number)).logprobs_M.square().sum().backward()
    nearly(gradients(policy), gradients(plain))
    found, expected = (model.logprobs(forest(number)) for model in (policy, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_outputs_and_gradients_are_equal_and_layers_share_their_graphs():
    plain = tiny.tiny_policy("qwen3", std=0.05, num_hidden_layers=3)
    policy = copy.deepcopy(plain)
    assert compile_layers(policy, backend="aot_eager") is None
    seen = []
    for number in range(len(FORESTS)):
        equal(policy, plain, number)
        seen.append(graphs())
    # One layer needs nearly as many: fixed lengths, then any; each with and without gradients.
    # Nothing after that.
    assert seen[1] == seen[-1] <= 24


@pytest.mark.slow
def test_adapters_recomputed_activations_and_lower_precision_change_nothing():
    plain = tiny.tiny_policy("qwen3", std=0.05, num_hidden_layers=1)
    adapters = LoraConfig(enabled=True, dim=4, dropout=0.0)
    plain.causal_lm = add_adapters(plain.causal_lm, adapters, trains_head=False)
    tiny.draw_adapters(plain, 0.1)
    policy = copy.deepcopy(plain)
    recompute_activations(policy.causal_lm)
    compile_layers(policy, backend="aot_eager")
    equal(policy, plain, 0)
    # A check computes in full precision, and compiles nothing for it.
    policy.precision = plain.precision = torch.bfloat16
    before = graphs()
    with policy.in_full_precision():
        exact = policy.logprobs(forest(0))
    assert graphs() == before
    assert (policy.logprobs(forest(0)) - exact).abs().max() < 0.1
    assert graphs() > before


def test_a_reward_model_scores_the_same():
    plain = tiny.tiny_reward_model("llama", num_hidden_layers=1)
    model = copy.deepcopy(plain)
    compile_layers(model, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(model(forest(0)), plain(forest(0)), rtol=0, atol=1e-6)
    assert graphs() > 0


def test_a_model_that_is_loaded_later_leaves_attention_out_of_the_graphs():
    """It registers attention, too; each forest would be compiled anew from then on."""
    compile_layers(tiny.tiny_policy("qwen3", num_hidden_layers=1), backend="aot_eager")
    outside = AttentionInterface()[FOREST]
    assert outside is not forest_attention
    register()
    assert AttentionInterface()[FOREST] is outside


@pytest.mark.slow
def test_completions_have_the_log_probabilities_of_the_model():
    plain = tiny.tiny_policy("qwen3", std=0.1, num_hidden_layers=1)
    policy = copy.deepcopy(plain)
    compile_layers(policy, backend="aot_eager")
    with closing(TransformersEngine(policy, tiny_tokenizers.chatml(), end_ids=[])) as engine:
        asked = request([5, 6, 7] * 7, seeds=range(3), max_new_tokens=6)
        for one in draw(engine, asked)[0]:
            assert one.logprobs_L == pytest.approx(full_logprobs(plain, asked, one), abs=1e-5)


@pytest.mark.slow
def test_nothing_is_compiled_while_a_step_is_captured():
    policy = tiny.tiny_policy("qwen2", std=0.1, num_hidden_layers=1, precision=torch.bfloat16)
    compile_layers(policy, backend="aot_eager")
    policy.without_gradients = torch.no_grad  # as on a GPU
    compiled = []

    def capture(compute):
        before = graphs()
        result = compute()
        compiled.append(graphs() - before)
        return lambda: result.copy_(compute()), result

    with closing(
        TransformersEngine(policy, tiny_tokenizers.chatml(), end_ids=[], static_slots=True)
    ) as engine:
        engine._batch.static.capture = capture
        asked = [
            request([5, 6, 7], seeds=range(2), max_new_tokens=length, request_id=str(length))
            for length in (5, 10, 15)
        ]
        draw(engine, *asked, request([8], seeds=(1,), max_new_tokens=20))
    assert graphs() > 0
    assert compiled == [0, 0, 0]  # of 8, 4 and 1 rows


@pytest.mark.slow
def test_the_whole_compiler_computes_the_same():
    plain = tiny.tiny_policy("qwen3", std=0.1, num_hidden_layers=1)
    policy = copy.deepcopy(plain)
    compile_layers(policy)
    equal(policy, plain, 0, trains=False)


@pytest.mark.slow
def test_layers_that_ranks_shard_compute_the_same():
    work, sizes = parallel_work.with_compiled_layers, {"dp_shard": 2}
    for plain, found in together(work, 2, sizes, deadline=300):
        assert found["graphs"] > plain["graphs"] == 0
        torch.testing.assert_close(found["outputs"], plain["outputs"], rtol=0, atol=2e-6)
        nearly(found["gradients"], plain["gradients"])


def test_what_cannot_be_compiled_is_named_and_auto_leaves_cpus_and_shards_alone(monkeypatch):
    reason = compile_layers(tiny.tiny_policy("qwen3", path="padded"))
    assert reason is not None
    assert "padded" in reason
    monkeypatch.setattr(pretrained, "_has_triton", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    chosen = {
        (device, is_sharded): [
            chooses_to_compile(asked, torch.device(device), is_sharded=is_sharded)
            for asked in ("auto", True, False)
        ]
        for device in ("cpu", "cuda")
        for is_sharded in (False, True)
    }
    assert chosen.pop(("cuda", False)) == [True, True, False]
    assert all(one == [False, True, False] for one in chosen.values())

"""The forest on a GPU: the same scores as one by one there, and as on the CPU."""

import pytest
import torch

import tiny
import tiny_tokenizers as made
from laurel.data.forest import to_forest, to_padded
from laurel.models.loading.pretrained import recompute_activations
from laurel.models.loading.reward_model import check_paths
from laurel.models.scoring import ScoringContract
from laurel.rewards.scorer import LocalScorer
from laurel.types import Message, group_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
DEVICE = torch.device("cuda")
ALL = sorted(tiny.ARCHITECTURES)
SHAPES = [(40, [5, 1, 30]), (0, [7]), (3, [2, 2]), (1, [1, 1]), (0, [1]), (17, [3, 9, 1, 25])]


def gradients(model, scores):
    model.zero_grad()
    (scores * torch.linspace(-1, 1, scores.numel(), device=DEVICE).view_as(scores)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-30))
        for n in expected
    )


@pytest.mark.parametrize("name", ALL)
def test_scores_and_gradients_are_those_of_one_by_one(name):
    model = tiny.tiny_reward_model(name, dtype=torch.float64).to(DEVICE)
    groups = tiny.random_groups(1, SHAPES)
    scores_NK = model(to_forest(groups))
    expected_NK = tiny.one_by_one(model, groups, tiny.own_attention(model.classifier))
    assert scores_NK.device.type == DEVICE.type
    tolerance = 1e-6 if name == "gemma2" else 1e-11  # whose own softmax is float32 in any model
    assert float((scores_NK - expected_NK).detach().abs().max()) <= tolerance
    assert relative_difference(gradients(model, scores_NK), gradients(model, expected_NK)) <= 1e-5


@pytest.mark.parametrize("name", ALL)
def test_scores_are_those_of_the_cpu(name):
    """In float32, at the size of trained weights; other kernels, other order of sums."""
    model = tiny.tiny_reward_model(name, std=0.05)
    forest = to_forest(tiny.random_groups(2, SHAPES))
    with torch.inference_mode():
        expected_NK = model(forest)
        scores_NK = model.to(DEVICE)(forest).cpu()
    torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma2", "phi"])
def test_activation_checkpointing_changes_no_gradient(name):
    forest = to_forest(tiny.random_groups(3, SHAPES))
    results = []
    for is_on in (False, True):
        model = tiny.tiny_reward_model(name).to(DEVICE).train()
        if is_on:
            recompute_activations(model.classifier)
        results.append(gradients(model, model(forest)))
    # Not bit for bit: backward kernels of a GPU may add in another order each time.
    assert relative_difference(*results) <= 1e-5


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bfloat16_the_noise_is_that_of_a_padded_batch(name, weights):
    groups = tiny.random_groups(4, SHAPES * 4)
    exact = tiny.tiny_reward_model(name, dtype=torch.float64).to(DEVICE)
    model = tiny.tiny_reward_model(name, precision=torch.bfloat16, dtype=weights).to(DEVICE)
    with torch.inference_mode():
        truth_NK = exact(to_forest(groups))
        forest_NK = model(to_forest(groups))
        model.classifier.set_attn_implementation(tiny.own_attention(model.classifier))
        padded_NK = model(to_padded(groups, pad_id=0))
    size, noise, own_noise = (
        float(t.double().square().mean().sqrt())
        for t in (truth_NK, forest_NK - truth_NK, padded_NK - truth_NK)
    )
    assert forest_NK.dtype == torch.float32
    assert 1e-4 * size <= noise <= 0.05 * size
    assert noise <= 1.25 * own_noise


@pytest.mark.parametrize("name", ALL)
def test_the_self_check_passes(name):
    assert check_paths(tiny.tiny_reward_model(name).to(DEVICE)) < 1e-5


def test_a_scorer_gives_the_scores_of_the_cpu():
    contract = ScoringContract.create(
        made.chatml(), max_length=256, truncation_side="left", append_eos=True
    )
    model = tiny.tiny_reward_model("qwen3", std=0.05)
    groups = [
        group_of([Message("user", f"{i}?")], ["Yes. " * i, "No."], group_id=str(i))
        for i in range(1, 6)
    ]
    expected = LocalScorer(model, contract).score_now(groups)
    found = LocalScorer(model.to(DEVICE), contract, batch_tokens=200).score_now(groups)
    for one, other in zip(found, expected, strict=True):
        assert [s.value for s in one] == pytest.approx([s.value for s in other], abs=5e-6)

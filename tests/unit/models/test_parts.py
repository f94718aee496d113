"""A forest that is computed in parts gives what one pass gives: outputs and gradients."""

import dataclasses
import gc
import inspect
import sys
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest
from laurel.models.forest.parts import _Held, _Work, backward_in_parts
from laurel.models.forest.tree_parts import parts_of
from laurel.models.loading.adapters import add_adapters
from laurel.models.loading.pretrained import recompute_activations
from random_trees import groups_of_tree

ALL = sorted(tiny.LANGUAGE_MODELS)
SHAPES = [(40, [5, 1, 30, 12]), (1, [7]), (3, [2, 2]), (17, [1, 26])]


def weights_of(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def in_one_pass(model, forest):
    """Log-probabilities and the gradients of a loss that is no sum over tokens."""
    model.zero_grad()
    lengths = model.readings(forest).lengths_N
    logprobs_M = model(forest).logprobs_M
    loss_of_units(logprobs_M, lengths, range(len(lengths)), lengths).backward()
    return logprobs_M.detach(), gradients(model)


def loss_of_units(logprobs_M, of_outputs, completions, lengths):
    """The weighted squares of the means of completions: as of ratios of whole sequences."""
    weights = weights_of(len(lengths))
    means = [piece.mean() for piece in logprobs_M.split(list(of_outputs))]
    return sum(weights[n] * mean**2 for n, mean in zip(completions, means, strict=True))


def in_parts(model, forest, budget, *, units=None):
    forest = dataclasses.replace(forest, part_tokens=budget)
    assert forest.is_in_parts
    lengths = model.readings(forest).lengths_N
    units = units or [[n] for n in range(len(lengths))]
    with torch.no_grad():
        found_M = model(forest).logprobs_M
    model.zero_grad()
    done = []

    def loss_of(outputs, some):
        completions = [n for unit in some for n in units[unit]]
        done.extend(completions)
        loss = loss_of_units(
            outputs.logprobs_M, [lengths[n] for n in completions], completions, lengths
        )
        return loss, loss.detach()

    backward_in_parts(model, forest, units, loss_of)
    assert sorted(done) == list(range(len(lengths)))
    return found_M, gradients(model)


def assert_same(found, wanted, *, outputs=1e-11, grads=1e-6):
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=outputs)
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert (found[1][name] - value).norm() <= grads * value.norm(), name


def tolerance(name):
    # These compute their norms in float32 in any model, and so the gradients of them.
    return 1e-6 if name.startswith(("gemma", "cohere")) else 1e-10


@pytest.mark.parametrize("name", ALL)
def test_parts_give_the_outputs_and_gradients_of_one_pass(name):
    model = tiny.tiny_policy(name, dtype=torch.float64, temperature=0.8)
    forest = to_forest(tiny.random_groups(1, SHAPES))
    wanted = in_one_pass(model, forest)
    assert_same(in_parts(model, forest, 12), wanted, grads=tolerance(name))


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma2-capped", "gpt-oss", "cohere"])
def test_parts_of_deep_trees_give_the_outputs_and_gradients_of_one_pass(name):
    model = tiny.tiny_policy(name, dtype=torch.float64)
    groups, _ = groups_of_tree(ALL.index(name), nodes=20, shapes=SHAPES[:1])
    forest = to_forest(groups, least_shared=1)
    wanted = in_one_pass(model, forest)
    assert_same(in_parts(model, forest, 20), wanted, grads=tolerance(name))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_parts_hold_every_token_once_behind_its_path(seed, nodes, budget, is_deep):
    groups, _ = groups_of_tree(seed, nodes=nodes, depth=4, shapes=SHAPES)
    forest = to_forest(groups, least_shared=1 if is_deep else None)
    parts = parts_of(forest.trees, budget)
    own = [[t for span in part.spans for t in range(*span)] for part in parts]
    assert sorted(t for tokens in own for t in tokens) == list(range(len(forest.ids_T)))
    assert all(0 < len(tokens) <= budget for tokens in own)
    positions = forest.positions_T
    for number, part in enumerate(parts):
        assert part.parent < number
        path = [own[above][t] for above, span in part.path for t in range(*span)]
        assert positions[path].tolist() == list(range(len(path)))
        starts = [s for tree in part.trees for s in tree.starts]
        spans = [s for tree in part.trees for s in tree.nodes]
        row = [start + i for start, s in zip(starts, spans, strict=True) for i in range(s.length)]
        assert row == positions[path + own[number]].tolist()


@pytest.mark.parametrize("is_stored", [True, False])
def test_parts_with_adapters_and_recomputed_layers(is_stored):
    model = tiny.tiny_policy("llama", dtype=torch.float64)
    lora = LoraConfig(enabled=True, dim=4)
    model.causal_lm = add_adapters(model.causal_lm, lora, trains_head=False)
    tiny.draw_adapters(model.causal_lm, 0.3)
    forest = to_forest(tiny.random_groups(1, SHAPES))
    model.train()
    wanted = in_one_pass(model, forest)
    assert all("lora_" in name for name in wanted[1])
    if not is_stored:
        recompute_activations(model.causal_lm)
    assert_same(in_parts(model, forest, 25), wanted)


def test_all_passes_over_a_part_draw_the_same_dropout(monkeypatch):
    model = tiny.tiny_policy("llama", attention_dropout=0.5).train()
    forest = to_forest(tiny.random_groups(1, SHAPES))
    seen, own = {}, model.hidden_of_row

    def hidden_of_row(ids_T, positions_T, plan):
        hidden_TD = own(ids_T, positions_T, plan)
        rows = plan.read_X.to(hidden_TD.device)
        seen.setdefault(tuple(ids_T.tolist()), []).append(hidden_TD[rows].detach())
        return hidden_TD

    monkeypatch.setattr(model, "hidden_of_row", hidden_of_row)
    in_parts(model.train(), forest, 25)
    # Once without gradients for the outputs, then once, or twice where other parts hang below.
    again = [passes for passes in seen.values() if len(passes) > 2]
    assert again
    for _, first, *others in again:
        assert all(torch.equal(first, other) for other in others)


def test_keys_and_values_are_in_memory_until_their_last_part_is_done(monkeypatch):
    model = tiny.tiny_policy("qwen3", dtype=torch.float64)
    (group,) = tiny.random_groups(1, [(20, [10] * 4)])
    leaves, learn = [], _Held.learn

    def noting(held):
        learn(held)
        leaves.extend(weakref.ref(tensor) for pair in held.keys.values() for tensor in pair)

    monkeypatch.setattr(_Held, "learn", noting)
    gc.disable()  # nobody looks for circles of references
    try:
        in_parts(model, to_forest([group]), 25)
        assert leaves
        assert not any(leaf() is not None for leaf in leaves)
    finally:
        gc.enable()


def test_parts_compute_in_the_precision_of_the_model(monkeypatch):
    model = tiny.tiny_policy("qwen3", precision=torch.bfloat16)
    dtypes, learn = set(), _Held.learn

    def noting(held):
        learn(held)
        dtypes.update(tensor.dtype for pair in held.keys.values() for tensor in pair)

    monkeypatch.setattr(_Held, "learn", noting)
    forest = to_forest(tiny.random_groups(1, SHAPES))
    wanted = in_one_pass(model, forest)
    assert_same(in_parts(model, forest, 25), wanted, outputs=0.1, grads=0.1)
    assert dtypes == {torch.bfloat16}


def test_gradients_of_many_parts_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256."""
    key = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    held = _Held({0: (key, key.clone())}, torch.zeros(1, 4))
    held.learn()
    leaf, _ = held.keys[0]
    for _ in range(300):
        leaf.sum().backward()
    by_key, by_value = held.debts()[0]
    assert by_key.eq(300).all()
    assert by_value.eq(0).all()


def test_what_fits_is_one_part():
    (group,) = tiny.random_groups(1, [(4, [3] * 4)])
    trees = to_forest([group]).trees
    for budget, sizes in ((16, [16]), (15, [4, 12]), (6, [4, 6, 6]), (5, [4, 3, 3, 3, 3])):
        parts = parts_of(trees, budget)
        assert [sum(span.length for span in part.spans) for part in parts] == sizes


def counted(model, monkeypatch):
    """The numbers of tokens of all passes from now on."""
    sizes, own = [], model.hidden_of_row

    def hidden_of_row(ids_T, positions_T, plan):
        sizes.append(len(ids_T))
        return own(ids_T, positions_T, plan)

    monkeypatch.setattr(model, "hidden_of_row", hidden_of_row)
    return sizes


def test_completions_whose_first_tokens_are_equal_are_computed_once(monkeypatch):
    model = tiny.tiny_policy("llama", dtype=torch.float64)
    (group,) = tiny.random_groups(1, [(20, [10] * 6)])
    for branch in group.branches_ids_G:
        branch[0] = 7
    forest = to_forest([group])
    wanted = in_one_pass(model, forest)
    sizes = counted(model, monkeypatch)
    found = in_parts(model, forest, 25)
    assert_same(found, wanted)
    # Once each for the outputs; for the gradients the prompt twice, and each completion once.
    assert sum(sizes) == 2 * len(forest.ids_T) + 20


@pytest.mark.slow
def test_a_chain_of_parts_may_be_longer_than_calls_may_nest():
    model = tiny.tiny_policy("llama", dtype=torch.float64, num_hidden_layers=1)
    (group,) = tiny.random_groups(1, [(80, [70])])
    forest = to_forest([group])
    wanted = in_one_pass(model, forest)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 120)
    try:
        found = in_parts(model, forest, 1)
    finally:
        sys.setrecursionlimit(limit)
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "units",
    [[[0, 1, 2], [3]], [[0, 1], [2], [3]], [[0], [1, 2, 3]]],
    ids=["a tree", "two", "of two trees"],
)
def test_the_keys_and_values_of_one_path_are_in_memory(units, monkeypatch):
    """Also where a loss is of several completions, each of them longer than a part."""
    model = tiny.tiny_policy("llama", dtype=torch.float64)
    forest = to_forest(tiny.random_groups(1, [(40, [60, 70, 5]), (3, [9])]))
    wanted = in_one_pass(model, forest)
    most, compute = [], _Work.compute

    def watched(work, number, **options):
        held = sorted({*work.held, number})
        assert all(below < work.ends[above] for above, below in pairwise(held))
        most.append(len(held))
        return compute(work, number, **options)

    monkeypatch.setattr(_Work, "compute", watched)
    assert_same(in_parts(model, forest, 25, units=units), wanted)
    assert max(most) > 3

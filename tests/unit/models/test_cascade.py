"""The cascade: what it keeps, and the index arithmetic of the form that only GPUs compute."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.library import Library
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from dense_oracle import dense_attention, drawn_forest, oracle_of
from laurel.data.forest import to_forest
from laurel.models.forest.attention import (
    AttentionOptions,
    Cascade,
    ForestPlan,
    SpanCall,
    ancestor_keys,
    attend_by_blocks,
    in_pieces,
    keys_in_window,
    own_keys,
    packed_calls,
)
from laurel.models.loading.pretrained import recompute_activations
from laurel.types import Span, Tree
from random_trees import groups_of_tree

CPU = torch.device("cpu")
PLAIN = {"scaling": None, "dropout": 0.0, "sliding_window": None, "softcap": None, "s_aux": None}
RAGGED = st.lists(
    st.tuples(st.integers(0, 45), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def drawn(num_tokens, *, heads=4, kv_heads=2, width=8, dtype=torch.float64, seed=0):
    """Queries, keys and values of a layer, tokens first in memory."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, num_tokens, n, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def with_gradients(out, leaves):
    pull = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * pull).sum(), leaves)]


def expected_of(oracle, leaves, **options):
    out, _ = dense_attention(nn.Identity(), *leaves, None, oracle=oracle, **options)
    return with_gradients(out.transpose(1, 2), leaves)


class Emulated:
    """What `_flash_attention_forward` and its backward compute, sequence by sequence."""

    def __init__(self):
        self.calls = []

    def _sequences(self, q, k, cum_q, cum_k, causal, scale, left, right):
        assert cum_q.dtype == cum_k.dtype == torch.int32
        assert cum_q[0] == cum_k[0] == 0
        assert (cum_q[-1], cum_k[-1]) == (len(q), len(k))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        for rows, seen in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
            rows, seen = slice(*rows), slice(*seen)
            # The last query and the last key are aligned.
            ends = torch.arange(seen.stop - seen.start)
            starts = (
                torch.arange(rows.stop - rows.start)[:, None] + len(ends) - (rows.stop - rows.start)
            )
            visible = torch.ones(len(starts), len(ends), dtype=torch.bool)
            if causal or right == 0:
                visible &= ends <= starts
            if left is not None:
                visible &= ends >= starts - left
            logits = torch.einsum("qhd,khd->hqk", q[rows], k[seen][:, heads]) * scale
            yield rows, seen, heads, logits.masked_fill(~visible, -torch.inf), scale

    def forward(self, *arguments, scale=None, window_size_left=None, window_size_right=None):
        q, k, v, cum_q, cum_k, max_q, max_k, dropout, is_causal, debug = arguments
        assert not debug
        assert dropout == 0.0
        assert (max_q, max_k) == (int(cum_q.diff().max()), int(cum_k.diff().max()))
        self.calls.append("forward")
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for rows, seen, heads, logits, _ in self._sequences(
            q, k, cum_q, cum_k, is_causal, scale, window_size_left, window_size_right
        ):
            lse[:, rows] = logits.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[seen][:, heads])
        nothing = q.new_empty(0)
        return out, lse, nothing, nothing, nothing

    def backward(self, *arguments, scale=None, window_size_left=None, window_size_right=None):
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, *rest = arguments
        dropout, is_causal, rng_state, unused = rest
        assert rng_state.dtype == torch.uint64
        assert unused.numel() == dropout == 0
        assert (max_q, max_k) == (int(cum_q.diff().max()), int(cum_k.diff().max()))
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        self.calls.append("backward")
        by_q, by_k, by_v = (torch.zeros_like(t) for t in (q, k, v))
        for rows, seen, heads, logits, factor in self._sequences(
            q, k, cum_q, cum_k, is_causal, scale, window_size_left, window_size_right
        ):
            weights = (logits - lse[:, rows, None]).exp()
            by_weights = torch.einsum("qhd,khd->hqk", grad[rows], v[seen][:, heads])
            share = (grad[rows] * out[rows]).sum(-1).T[..., None]
            by_logits = weights * (by_weights - share) * factor
            by_q[rows] = torch.einsum("hqk,khd->qhd", by_logits, k[seen][:, heads])
            for total, part in (
                (by_k, torch.einsum("hqk,qhd->khd", by_logits, q[rows])),
                (by_v, torch.einsum("hqk,qhd->khd", weights, grad[rows])),
            ):
                total[seen] = torch.zeros_like(total[seen]).index_add_(1, heads, part)
        return by_q, by_k, by_v


@pytest.fixture(scope="module")
def emulated():
    """The operators of torch that only CUDA has compute on CPUs."""
    kernels, library = Emulated(), Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", kernels.forward)
    library.impl("_flash_attention_backward", kernels.backward)
    yield kernels
    library._destroy()


@settings(max_examples=60, deadline=None)
@given(
    shapes=RAGGED,
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 40),
    scaling=st.none() | st.floats(0.1, 1.0),
    is_deep=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_packed_calls_are_the_dense_mask(
    emulated, shapes, kv_heads, window, scaling, is_deep, seed
):
    forest, oracle = drawn_forest(shapes, seed, is_deep=is_deep)
    leaves = drawn(len(forest.ids_T), kv_heads=kv_heads, seed=seed)
    emulated.calls.clear()
    calls = packed_calls(forest.trees, CPU, window)
    rows = (t[0].transpose(0, 1) for t in leaves)
    out = Cascade.apply(*rows, tuple(calls), scaling).transpose(0, 1)[None]
    expected = expected_of(oracle, leaves, scaling=scaling, sliding_window=window)
    for one, other in zip(with_gradients(out, leaves), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    most = 1 + max(max(tree.depths) for tree in forest.trees)
    assert emulated.calls.count("forward") == emulated.calls.count("backward") <= most
    assert most == 2 or is_deep


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("is_deep", [False, True])
def test_queries_behind_a_given_root_see_the_same(emulated, window, is_deep):
    """Of the forms that GPUs compute; those of a CPU are tested with whole models in parts."""
    nodes, parents = (Span(0, 30), Span(30, 37), Span(37, 55)), (-1, 0, 1 if is_deep else 0)
    tree, leaves = Tree(nodes, parents), drawn(55, width=16)
    query, key, value = leaves
    whole = ForestPlan([tree]).attend_by_segments(*leaves, _options(window))
    expected = with_gradients(whole[:, :, 30:], leaves)
    calls = packed_calls([tree], CPU, window, num_given=30)
    rows = (t[0].transpose(0, 1) for t in (query[:, :, 30:], key, value))
    packed = Cascade.apply(*rows, tuple(calls), None).transpose(0, 1)[None]
    blocks = ForestPlan([tree], has_root=False).block_mask(CPU, window)
    still = [t.detach() for t in (query[:, :, 30:], key, value)]
    flex = attend_by_blocks(flex_attention, *still, blocks, _options(window))
    for one, other in zip(with_gradients(packed, leaves), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flex, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["answers", "deep", "pieces"])
def test_spans_in_a_batch_are_to_the_bit_what_each_is_alone(kind):
    shapes = [(9 + i % 3, [6, 7]) for i in range(20)]
    groups = groups_of_tree(1)[0] if kind == "deep" else tiny.random_groups(1, shapes)
    trees = to_forest(groups, least_shared=1).trees
    own, before = in_pieces(trees, size=4 if kind == "pieces" else 192)
    leaves = drawn(max(queries.end for queries, _ in own), width=32, dtype=torch.float32)
    rows = [t[0].transpose(0, 1) for t in leaves]

    def computed(most):
        calls = (
            SpanCall(own, is_causal=True, most=most),
            SpanCall(before, is_causal=False, most=most),
        )
        with Counter() as counter:
            found = with_gradients(Cascade.apply(*rows, calls, None), leaves)
        return found, counter.counts["_scaled_dot_product_flash_attention_for_cpu"]

    alone, num_alone = computed(0)
    batched, num_batched = computed(100)
    assert num_alone == len(own) + len(before)
    assert num_batched < num_alone / 2
    assert all(torch.equal(one, other) for one, other in zip(alone, batched, strict=True))


def _options(window):
    return AttentionOptions(sliding_window=window)


class Counter(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts = {}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_on_a_gpu_a_deep_tree_makes_a_call_more_than_it_is_deep():
    groups, _ = groups_of_tree(0)
    forest = to_forest(groups, least_shared=1)
    model = tiny.tiny_reward_model("llama").bfloat16().to("meta").train()
    with Counter() as counter:
        model.hidden(forest).sum().backward()
    most = (1 + max(forest.trees[0].depths)) * model.classifier.config.num_hidden_layers
    assert counter.counts["_flash_attention_forward"] == most
    assert counter.counts["_flash_attention_backward"] == most


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_groups", [1, 7])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sliding", "qwen2-sliding"])
def test_on_a_gpu_a_layer_makes_at_most_two_attention_calls(name, num_groups, recomputes):
    """On tensors that have shapes and no numbers: whoever wants to read one back fails."""
    forest = to_forest(tiny.random_groups(1, [(40, [5, 1, 30, 9]), (17, [3, 9])] * num_groups))
    model = tiny.tiny_reward_model(name).bfloat16().to("meta").train()
    if recomputes:
        recompute_activations(model.classifier)
    layers = model.classifier.config.num_hidden_layers
    with Counter() as counter:
        hidden_TD = model.hidden(forest)
        forward = counter.counts["_flash_attention_forward"]
        hidden_TD.sum().backward()
    windows = 2 if "qwen2" in name else layers if "mistral" in name else 0
    assert forward == 2 * layers - windows
    assert counter.counts["_flash_attention_forward"] == forward * (1 + recomputes)
    assert counter.counts["_flash_attention_backward"] == forward
    assert not any("scaled_dot_product" in name for name in counter.counts)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 12])
def test_flex_attention_sees_the_same(window, softcap, has_sinks, is_deep):
    """Forward only: FlexAttention has no backward pass on CPUs."""
    forest, oracle = drawn_forest([(40, [5, 1, 30]), (0, [7]), (3, [2, 2])], 3, is_deep=is_deep)
    leaves = [t.detach() for t in drawn(len(forest.ids_T), width=16)]
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64) if has_sinks else None
    asked = {**PLAIN, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    options = AttentionOptions(**asked)
    blocks = ForestPlan(forest.trees).block_mask(CPU, window)
    found = attend_by_blocks(flex_attention, *leaves, blocks, options)
    expected, _ = dense_attention(nn.Identity(), *leaves, None, oracle=oracle, **asked)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 12])
def test_tokens_that_fill_the_row_see_nobody_and_are_not_seen(window):
    plan = ForestPlan(to_forest(tiny.random_groups(6, [(40, [5, 1]), (0, [7])])).trees)
    options = AttentionOptions(**{**PLAIN, "sliding_window": window})
    num_tokens = sum(plan.lengths)
    leaves = drawn(num_tokens + 3)
    found = plan.attend(nn.Identity(), *leaves, options)
    few = [t[:, :, :num_tokens].detach().requires_grad_() for t in leaves]
    expected = plan.attend(nn.Identity(), *few, options)
    assert torch.equal(found[:, :, :num_tokens], expected)
    assert not found[:, :, num_tokens:].any()
    gradients = torch.autograd.grad((found * found).sum(), leaves)
    wanted = torch.autograd.grad((expected * expected).sum(), few)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one[:, :, :num_tokens], other, rtol=0, atol=1e-12)
        assert not one[:, :, num_tokens:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_kept_but_tensors_of_the_distinct_tokens(dtype):
    groups = tiny.random_groups(2, [(300, [40] * 16), (250, [230, 3])])
    forest = to_forest(groups)
    num_tokens = len(forest.ids_T)
    leaves = drawn(num_tokens, dtype=dtype)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plan = ForestPlan(forest.trees)
        out = plan.attend(nn.Identity(), *leaves, AttentionOptions(**PLAIN))
    mine = {t.untyped_storage().data_ptr() for t in (*leaves, out)}
    assert mine < kept.keys()
    (lse,) = [tensor for place, tensor in kept.items() if place not in mine]
    assert (lse.shape, lse.dtype) == ((4, num_tokens), torch.float32)
    # The output lies as the next layer reads it, so that its input is no copy.
    assert out.transpose(1, 2).is_contiguous()
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    assert sum(sizes) == num_tokens * ((4 + 2 + 2 + 4) * 8 * dtype.itemsize + 4 * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_no_noisier_than_segment_by_segment(dtype):
    groups = tiny.random_groups(5, [(260, [40] * 6 + [230]), (3, [9, 1])])
    plan = ForestPlan(to_forest(groups).trees)
    options = AttentionOptions(**PLAIN)
    leaves = drawn(sum(plan.lengths), width=32, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = expected_of(oracle_of(groups), exact)
    cascade = with_gradients(plan.attend(nn.Identity(), *leaves, options), leaves)
    segments = with_gradients(plan.attend_by_segments(*leaves, options), leaves)
    for one, other, truth in zip(cascade, segments, expected, strict=True):
        noise, usual = (float((t.double() - truth).norm()) for t in (one, other))
        assert noise <= 1.25 * usual


TREES = (
    Tree.of(Span(0, 5), (Span(5, 7), Span(7, 8))),
    Tree.of(Span(8, 8), (Span(8, 10),)),
    Tree.of(Span(10, 11), ()),
)


DEEP = Tree(
    (Span(0, 3), Span(3, 5), Span(5, 6), Span(6, 8), Span(8, 9), Span(9, 12)), (-1, 0, 1, 1, 3, 0)
)
"""A root of 3 tokens: a child of 2, whose children are 1, and 2 with one of 1; a child of 3."""


def test_who_sees_whom_in_a_deep_tree_by_hand():
    assert DEEP.depths == (0, 1, 2, 2, 3, 1)
    assert DEEP.starts == (0, 3, 5, 5, 7, 3)
    assert DEEP.exits == (6, 5, 3, 5, 5, 6)
    assert DEEP.path(4) == [0, 1, 3, 4]
    other = Tree.of(Span(12, 13), [Span(13, 14)])
    assert ancestor_keys([DEEP, other]) == [
        [(Span(3, 12), (Span(0, 3),)), (Span(13, 14), (Span(12, 13),))],
        [(Span(5, 9), (Span(3, 5),))],
        [(Span(8, 9), (Span(6, 8),))],
    ]
    assert keys_in_window([DEEP], 5)[4] == (Span(8, 9), (Span(3, 5), Span(6, 8), Span(8, 9)))
    assert keys_in_window([DEEP], 4)[4] == (Span(8, 9), (Span(4, 5), Span(6, 8), Span(8, 9)))


def test_who_sees_whom_by_hand():
    assert own_keys(TREES) == [
        (Span(*span), (Span(*span),)) for span in ((0, 5), (5, 7), (7, 8), (8, 10), (10, 11))
    ]
    assert ancestor_keys(TREES) == [[(Span(5, 8), (Span(0, 5),))]]
    assert keys_in_window(TREES, 3) == [
        (Span(0, 5), (Span(0, 5),)),
        (Span(5, 7), (Span(3, 5), Span(5, 7))),
        (Span(7, 8), (Span(3, 5), Span(7, 8))),
        (Span(8, 10), (Span(8, 10),)),
        (Span(10, 11), (Span(10, 11),)),
    ]
    # A window of one token: nobody sees another.
    assert keys_in_window(TREES, 1)[1] == (Span(5, 7), (Span(5, 7),))
    own, before = in_pieces(TREES, size=2)
    assert [tuple(queries) for queries, _ in own] == [
        *((0, 2), (2, 4), (4, 5), (5, 7)),
        *((7, 8), (8, 10), (10, 11)),
    ]
    assert before == [
        (Span(5, 8), (Span(0, 5),)),
        (Span(2, 4), (Span(0, 2),)),
        (Span(4, 5), (Span(0, 4),)),
    ]


@pytest.mark.slow
def test_a_branch_of_32k_tokens_trains_without_a_square():
    model = tiny.tiny_reward_model(
        "llama",
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
    ).train()
    forest = to_forest(tiny.random_groups(4, [(2048, [32768])]))
    with Counter() as counter:
        model(forest).sum().backward()
    assert counter.largest <= len(forest.ids_T) * 32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_window_that_holds_the_longest_row_costs_what_none_does(beyond):
    trees = to_forest(tiny.random_groups(6, [(40, [5, 1]), (0, [7])])).trees
    leaves = drawn(sum(ForestPlan(trees).lengths))
    found = []
    for window in (None, 40 + 5 + beyond):
        plan = ForestPlan(trees)  # which keeps what it has planned
        with Counter() as counter:
            out = plan.attend(nn.Identity(), *leaves, _options(window))
        found.append((counter.counts, out))
    (counts, out), (counts_of_window, out_of_window) = found
    assert (counts_of_window == counts) is (beyond >= 0)
    assert torch.equal(out_of_window, out) is (beyond >= 0)

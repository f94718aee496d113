"""Decoding steps of few shapes: what a CUDA graph needs of them, without a GPU."""

import contextlib
import itertools
import logging
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
import tiny_tokenizers
from generators import draw, full_logprobs, policy_and_tokenizer, request
from laurel.data.forest import to_forest
from laurel.generation.transformers import static
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.decoder import PASSES

pytestmark = pytest.mark.slow_parameters(
    "gemma",
    "gemma2",
    "mistral",
    "qwen2",
    "qwen3-sliding",
    "qwen3-tied",
    "olmo2",
    "cohere",
    "granite",
    "phi",
    "llama",
)


@contextlib.contextmanager
def engine_of(policy, **options):
    options = {"end_ids": [1], "max_concurrent": 8, "static_slots": True, **options}
    with contextlib.closing(
        TransformersEngine(policy, tiny_tokenizers.chatml(), **options)
    ) as engine:
        yield engine


class Recorded:
    """Stands in for CUDA graphs: a program is traced once, with all that is not a tensor fixed."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def __call__(self, compute):
        self.num_captures += 1
        traced = make_fx(compute)()  # its casts are recorded
        with torch.autocast("cpu", enabled=False):
            result = traced()

        def replay():
            self.num_replays += 1
            with torch.autocast("cpu", enabled=False):
                result.copy_(traced())

        return replay, result


MANY = [
    request("Where is the laurel?", seeds=range(5), max_new_tokens=12),
    request("a longer prompt " * 5, seeds=range(2), request_id="b", max_new_tokens=70),
    request("x", seeds=range(2), request_id="c", temperature=0.0),
    request("y", seeds=range(3), request_id="d", temperature=0.7, top_p=0.8, max_new_tokens=8),
    request("z", seeds=range(2), request_id="e", top_k=5, stop_token_ids=(9, 30)),
]


def same(found, expected):
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert one.ids_L.tolist() == other.ids_L.tolist()
            assert one.logprobs_L == pytest.approx(other.logprobs_L, abs=1e-6, rel=1e-6)


@pytest.mark.slow
def test_what_is_replayed_is_what_would_have_been_computed():
    policy, _ = policy_and_tokenizer()
    recorded = Recorded()
    with engine_of(policy, static_slots=False) as plain, engine_of(policy) as engine:
        steps = engine._batch.static
        steps.capture = recorded
        expected = draw(plain, *MANY)
        same(draw(engine, *MANY), expected)
        assert recorded.num_replays > 2 * recorded.num_captures > 0


def test_graphs_end_with_the_weights_that_were_rounded_for_them():
    policy, _ = policy_and_tokenizer(precision=torch.bfloat16)
    recorded = Recorded()
    few = request("Where?", seeds=(1,), max_new_tokens=7)
    with engine_of(policy, static_slots=False) as plain, engine_of(policy) as engine:
        steps = engine._batch.static
        steps.capture = recorded
        for _ in range(2):
            before = recorded.num_replays
            same(draw(engine, few), draw(plain, few))
            assert recorded.num_replays > before
            assert not steps._steps
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.1)


class Addresses(TorchDispatchMode):
    """Collects the memory that a program reads and did not allocate itself."""

    def __init__(self):
        super().__init__()
        self.read, self._made = {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            if tensor.untyped_storage().data_ptr() not in self._made:
                self.read[tensor.untyped_storage().data_ptr()] = tensor
        for tensor in _tensors(made):  # which live on, so that no other has their addresses
            if tensor.untyped_storage().data_ptr() not in self.read:
                self._made[tensor.untyped_storage().data_ptr()] = tensor
        return made


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", ["qwen2", "phi", "qwen3-tied"])
def test_a_graph_reads_only_memory_that_lives_as_long_as_it(name):
    policy = tiny.tiny_policy(name, std=0.1, precision=torch.bfloat16)
    policy.without_gradients = torch.no_grad  # as on a GPU: inference mode keeps no casts
    lost = []

    def capture(compute):
        with Addresses() as addresses:
            result = compute()
        batch = engine._batch
        stays = [*policy.parameters(), *policy.buffers(), policy.rounded_head_VD]
        stays += [getattr(module, "rounded", None) for module in policy.modules()]
        stays += [step.numbers for step in batch.static._steps.values()]
        for blocks in (batch._store._trunk_blocks, batch._store._branch_blocks):
            stays += tree_leaves([block._layers for block in blocks.values()])
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(stays)}
        lost.append([one.shape for at, one in addresses.read.items() if at not in known])
        return lambda: result.copy_(compute()), result

    with engine_of(policy, end_ids=[]) as engine:
        engine._batch.static.capture = capture
        draw(engine, request([5, 6, 7], seeds=range(3), max_new_tokens=6))
    assert lost == [[]]


def test_nothing_is_captured_while_another_model_computes_and_it_waits_for_a_capture():
    policy, _ = policy_and_tokenizer()
    other = tiny.tiny_reward_model("qwen3")
    forest = to_forest(tiny.random_groups(0, [(5, [2])]))
    recorded, asked = Recorded(), request(seeds=(1, 2), max_new_tokens=9)
    begun, late = threading.Event(), []

    def capture(compute):
        def score():
            begun.set()
            other(forest)
            late.append("scored")

        thread = threading.Thread(target=score)
        thread.start()
        begun.wait(10)
        thread.join(0.1)
        late.append("captured")
        threads.append(thread)
        return recorded(compute)

    threads = []
    with engine_of(policy, static_slots=False) as plain, engine_of(policy) as engine:
        engine._batch.static.capture = capture
        expected = draw(plain, asked)
        with PASSES.under_way():
            same(draw(engine, asked), expected)
        assert recorded.num_captures == 0
        same(draw(engine, asked), expected)
    for thread in threads:
        thread.join(10)
    assert recorded.num_captures == 1
    assert late == ["captured", "scored"]


def test_steps_are_computed_as_ever_where_no_graph_can_be_captured(caplog):
    policy, _ = policy_and_tokenizer()

    def refuse(_compute):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    asked = request(seeds=(1, 2), max_new_tokens=9)
    with engine_of(policy, static_slots=False) as plain, engine_of(policy) as engine:
        engine._batch.static.capture = refuse
        same(draw(engine, asked, asked), draw(plain, asked, asked))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "without CUDA graphs" in record.getMessage()
    assert "not permitted" in record.getMessage()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_capture_that_fails_is_undone_in_torchs_allocator(monkeypatch, has_begun):
    under_way, generator = ["pool"] if has_begun else [], torch.Generator()

    def end(index, pool):
        if pool not in under_way:
            raise RuntimeError("not currently recording to mempool_id")
        under_way.remove(pool)

    streams, released = [], []
    for name, made in {
        "Stream": lambda _: "side",
        "current_stream": lambda _: "main",
        "set_stream": streams.append,
        "CUDAGraph": object,
        "graph_pool_handle": lambda: "pool",
        "device": contextlib.nullcontext,
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "default_generators": [generator],
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: released.append(given))

    def compute():
        raise RuntimeError("not permitted")

    before = torch.rand(2, generator=generator.clone_state())
    with pytest.raises(RuntimeError, match="not permitted"):
        static.CudaGraphs(torch.device("cuda", 0))(compute)
    assert not under_way
    assert released == ([(0, "pool")] if has_begun else [])
    assert streams == ["main"]
    assert torch.equal(torch.rand(2, generator=generator), before)


class ReadsOnTheHost(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) * (2.0 if bool(hidden.isnan().any()) else 1.0)


def test_a_model_that_reads_values_on_the_host_is_never_captured(caplog):
    policy, _ = policy_and_tokenizer()
    layer = policy.causal_lm.base_model.layers[0]
    layer.mlp = ReadsOnTheHost(layer.mlp)
    with engine_of(policy) as engine:
        engine._batch.static.capture = recorded = Recorded()
        draw(engine, request(seeds=(1, 2), max_new_tokens=9))
        assert recorded.num_captures == 0
    assert "needs values on the host" in caplog.text


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_copies_between_devices_make_the_host_wait(context):
    with context(), static.HostReads() as reads:
        torch.ones(2).to(torch.float64).to("cpu")
        torch.ones(2).copy_(torch.zeros(2))
        assert not reads.names
        torch.ones(2).to("meta")
    assert reads.names == {"aten::_to_copy"}


@pytest.mark.parametrize("name", sorted(tiny.LANGUAGE_MODELS))
def test_every_architecture_is_static(name):
    policy = tiny.tiny_policy(name, std=0.1)
    asked = [
        request([5, 6, 7] * 9, seeds=range(3), max_new_tokens=16),
        request([9, 8], seeds=range(2), max_new_tokens=20),
    ]
    reads, count = static.HostReads(), itertools.count()
    with engine_of(policy, end_ids=[]) as engine:
        steps = engine._batch.static
        compute = steps._compute

        def watched(*given):
            with contextlib.nullcontext() if next(count) % 8 else reads:
                return compute(*given)

        steps._compute = watched
        for wanted, found in zip(asked, draw(engine, *asked), strict=True):
            for one in found:
                expected = full_logprobs(policy, wanted, one)
                assert one.logprobs_L == pytest.approx(expected, abs=1e-5)
    assert not reads.names


def test_few_shapes_serve_many_numbers_of_rows():
    policy, _ = policy_and_tokenizer()
    shapes = set()
    with engine_of(policy, end_ids=[], max_concurrent=16) as engine:
        steps = engine._batch.static
        run = steps._run
        steps._run = lambda key, numbers: (shapes.add(key.shape), run(key, numbers))[1]
        asked = [
            request(f"prompt {i}", seeds=(i,), request_id=str(i), max_new_tokens=4 + 3 * i)
            for i in range(16)
        ]
        draw(engine, *asked)
    assert sorted({shape.num_rows for shape in shapes}) == [1, 2, 4, 8, 16]
    assert len(shapes) == 5

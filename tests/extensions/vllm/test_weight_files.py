"""Weights in files, the probe that proves them, and what is done where the model is."""

import math
import os
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from laurel.errors import EngineError
from laurel.extensions.vllm import weight_files
from laurel.extensions.vllm.worker import repack, report_untruncated
from laurel.generation.weights.held import HeldDtype, held_dtype
from laurel.generation.weights.probe import ProbeAnswer, default_tolerance
from laurel.types import Weights


def weights(**tensors):
    return Weights(version=3, tensors=lambda: iter(tensors.items()))


def test_every_tensor_arrives_and_nothing_stays(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    sent = {
        "a": torch.randn(5, 7),
        "tied": shared,
        "head": shared,
        "row": shared[1],
        "turned": shared.T,
        "half": torch.randn(3).bfloat16(),
        "trained": torch.nn.Parameter(torch.randn(2, 2)),
    }
    with weight_files.written(weights(**sent), memory=tmp_path) as paths:
        assert all(path.parent.parent == tmp_path for path in paths)
        assert stat.S_IMODE(os.stat(paths[0].parent).st_mode) == 0o700
        found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    assert list(tmp_path.iterdir()) == []


def test_files_hold_what_the_engine_computes_with(tmp_path):
    """Half the bytes: a copy into the engine's own weights would round them to the same values."""
    sent = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(64, 32),
        "model.layers.0.mlp.gate.correction_bias": torch.randn(8),
        "model.norm.weight": torch.randn(32).half(),
        "ids": torch.arange(3),
    }
    held = held_dtype("bfloat16", ["language_model.layers.0.mlp.gate.correction_bias"], sent)
    with weight_files.written(weights(**sent), held=held, memory=tmp_path) as paths:
        found = load_file(paths[0])
        size = paths[0].stat().st_size
    up, bias, norm, ids = (found[name] for name in sent)
    assert torch.equal(up, torch.empty(64, 32, dtype=torch.bfloat16).copy_(sent[next(iter(sent))]))
    assert up.dtype == torch.bfloat16
    for name, kept in zip(list(sent)[1:], (bias, norm, ids), strict=True):
        assert kept.dtype == sent[name].dtype
        assert torch.equal(kept, sent[name])
    assert size < 2 * 64 * 32 + 1000


def test_an_engine_whose_wider_weights_are_computed_from_others_gets_them_as_they_are():
    saved = {"layers.0.mixer.A_log": (4,)}
    assert held_dtype("bfloat16", ["layers.0.mixer.A"], saved) is None
    assert held_dtype("bfloat16", [], {}) == HeldDtype("bfloat16")


def test_who_has_all_gets_what_changes(tmp_path):
    sent = {"a": torch.ones(2), "b": torch.zeros(3)}
    changing = {"a": torch.ones(2)}
    expected = {"a": (2,), "b": (3,)}
    both = Weights(version=3, tensors=sent.items, changing=lambda: changing.items())
    options = {"expected": expected, "memory": tmp_path}
    for weights, has_all, names in [
        (both, False, "ab"),
        (both, True, "a"),
        (Weights(version=3, tensors=sent.items), True, "ab"),
    ]:
        with weight_files.written(weights, has_all=has_all, **options) as paths:
            found = {name for path in paths for name in load_file(path)}
        assert found == set(names)
    changing["a"] = torch.ones(3)
    del sent["b"]
    for has_all, said in (
        (True, r"step 3: a has shape \[3\], but \[2\]"),
        (False, "step 3 lack 1 of the model's 2 tensors: b"),
    ):
        with (
            pytest.raises(EngineError, match=said),
            weight_files.written(both, has_all=has_all, **options),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_large_weights_come_in_several_files(tmp_path):
    sent = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}  # 40 bytes each
    with weight_files.written(weights(**sent), max_file_bytes=80, memory=tmp_path) as paths:
        assert [len(load_file(path)) for path in paths] == [2, 2, 2, 1]


def test_files_go_to_disk_where_memory_is_too_small(tmp_path):
    size = 1 << 60
    with weight_files.written(weights(a=torch.ones(1)), expected_bytes=size, memory=tmp_path) as p:
        assert tmp_path not in p[0].parents
    assert not p[0].exists()


@pytest.mark.parametrize(
    ("engine", "learner", "says"),
    [
        ([-1.0, -2.0], [-1.0, -2.5], r"step 7: token 2 .* -2 there and -2\.5 .* 0\.5, more than"),
        ([-1.0, math.nan], [-1.0, -2.0], "token 2 .* nan"),
        ([-1.0, -2.0], [-math.inf, -2.0], "token 1 .* -inf"),
        ([-1.0], [-1.0, -2.0], r"\(2,\) .* \(1,\)"),
    ],
)
def test_disagreement_is_told_with_both_numbers(engine, learner, says):
    def probe(ids):
        return np.array(learner)

    with pytest.raises(EngineError, match=says):
        ProbeAnswer([], np.array(engine), 0.25).require_agreement(probe, version=7)
    near = np.float32(learner) + 0.125 * np.arange(1, 3)
    if np.isfinite(near).all():
        assert ProbeAnswer([], near, 0.25).require_agreement(probe, version=1) == 0.25


class PackingMethod:
    """As vLLM's on a CPU: a copy of the weight is what is multiplied by."""

    def process_weights_after_loading(self, layer):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.quant_method = PackingMethod()
        self.quant_method.process_weights_after_loading(self)


def test_a_tied_head_is_packed_again():
    tied = torch.nn.Parameter(torch.ones(2, 2))
    emptied = Layer(torch.nn.Parameter(torch.empty(0)))
    model = torch.nn.ModuleDict({"embedding": Layer(tied), "head": Layer(tied), "up": emptied})
    model["norm"] = torch.nn.LayerNorm(2)
    with torch.no_grad():
        tied.fill_(3.0)
    x = torch.ones(1, 2)
    assert model["head"].cpu_linear(x).tolist() == [[2.0, 2.0]]  # stale
    assert repack(model) == ["embedding", "head"]
    assert model["head"].cpu_linear(x).tolist() == [[6.0, 6.0]]


def cut_to_one(logits):
    """Keep only the likeliest, in place, as vLLM's truncation may."""
    return logits.masked_fill_(logits < logits.max(-1, keepdim=True).values, -math.inf)


def test_the_coarser_precision_says_how_far_a_probe_may_be_off():
    assert default_tolerance("float32", "float32") == 1e-3
    assert default_tolerance("bfloat16", "float32") == default_tolerance("float32", "bfloat16")
    assert default_tolerance("float32", "bfloat16") == 0.2


def test_what_is_reported_comes_from_before_the_cut():
    """Of both samplers that versions of vLLM have."""

    def forward(logits, generators, k, p):
        kept = logits if k is None and p is None else cut_to_one(logits)
        return kept.argmax(-1), kept.log_softmax(-1)

    def draw(logits, mapping, mapping_np, pos, top_k, top_p, fused):
        return cut_to_one(logits).argmax(-1), logits

    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=forward))
    other = SimpleNamespace(_sample_random=draw)
    assert report_untruncated(sampler)
    assert report_untruncated(other)
    assert not report_untruncated(SimpleNamespace())
    for k in (None, torch.tensor([1])):
        drawn, logprobs = sampler.topk_topp_sampler.forward(logits.clone(), {}, k, None)
        assert drawn.tolist() == [2]
        assert torch.equal(logprobs, logits.log_softmax(-1))
    drawn, reported = other._sample_random(logits.clone(), 0, 0, 0, 1, 1, False)
    assert drawn.tolist() == [2]
    assert torch.equal(reported, logits)

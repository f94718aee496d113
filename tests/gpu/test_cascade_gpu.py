"""The forms of attention that only CUDA computes, against a dense mask."""

import pytest
import torch
from torch import nn
from torch.nn import attention

import tiny
from dense_oracle import dense_attention, oracle_of
from laurel.data.forest import to_forest
from laurel.models.forest.attention import AttentionOptions, ForestPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
SHAPES = [(300, [40] * 6 + [230]), (0, [7]), (3, [9, 1])]
PLAIN = {"scaling": None, "dropout": 0.0, "sliding_window": None, "softcap": None, "s_aux": None}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "asked"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"sliding_window": 70}),
        (torch.bfloat16, {"softcap": 5.0}),
        (torch.bfloat16, {"sliding_window": 70, "s_aux": True}),
        (torch.float32, {}),
        (torch.float32, {"softcap": 5.0, "sliding_window": 70}),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_a_dense_mask(dtype, asked, kv_heads):
    groups = tiny.random_groups(1, SHAPES)
    plan = ForestPlan(to_forest(groups).trees)
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, sum(plan.lengths), n, 64, generator=generator, dtype=torch.float64)
        .to(dtype)
        .double()
        .transpose(1, 2)
        .requires_grad_()
        for n in (4, kv_heads, kv_heads)
    ]
    options = {**PLAIN, **asked}
    if asked.get("s_aux"):
        options["s_aux"] = torch.linspace(-1, 2, 4)
    expected, _ = dense_attention(nn.Identity(), *exact, None, oracle=oracle_of(groups), **options)
    leaves = [t.detach().to("cuda", dtype).requires_grad_() for t in exact]
    if asked.get("s_aux"):
        options["s_aux"] = options["s_aux"].cuda()
    found = plan.attend(nn.Identity(), *leaves, AttentionOptions(**options)).transpose(1, 2)
    pull = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    truths = [expected, *torch.autograd.grad((expected * pull).sum(), exact)]
    pull = pull.to("cuda", dtype)
    ours = [found, *torch.autograd.grad((found * pull).sum(), leaves)]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for one, truth in zip(ours, truths, strict=True):
        exact_norm = truth.detach().norm()
        noise = float((one.detach().cpu().double() - truth.detach()).norm() / exact_norm)
        assert noise <= tolerance


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flash_attention_4_does_so_too_by_torchs_switch(kv_heads):
    pytest.importorskip("flash_attn.cute.interface")
    attention.activate_flash_attention_impl("FA4")
    try:
        test_outputs_and_gradients_are_those_of_a_dense_mask(torch.bfloat16, {}, kv_heads)
    finally:
        attention.restore_flash_attention_impl()

"""Attention over a forest by one square of logits: what every other form is compared with.

Importing this makes it known to transformers, as `ORACLE`.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

ORACLE = "test_dense_oracle"


def dense_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    oracle,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **_,
):
    """Softmax over one square of logits; who sees whom is read off tree, branch and position."""
    tree, branch, position = (torch.tensor(numbers) for numbers in oracle)
    mine, theirs = (slice(None), None), (None, slice(None))
    visible = tree[mine] == tree[theirs]
    visible &= (branch[theirs] < 0) | (branch[theirs] == branch[mine])
    distance = position[mine] - position[theirs]
    visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    heads = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key[:, heads]) * scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    weights = logits.exp() * visible
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.to(logits.dtype).exp().view(1, -1, 1, 1)
    return torch.einsum("bhqk,bkhd->bqhd", weights / total, value[:, heads].transpose(1, 2)), None


AttentionInterface.register(ORACLE, dense_attention)
AttentionMaskInterface.register(ORACLE, lambda *_, **__: None)


def oracle_of(groups):
    """Tree, branch (-1: trunk) and position of every token of `to_forest(groups)`."""
    rows = []
    for tree, group in enumerate(groups):
        trunk = len(group.trunk_ids)
        rows += [(tree, -1, position) for position in range(trunk)]
        for branch, ids in enumerate(group.branches_ids_G):
            rows += [(tree, branch, trunk + offset) for offset in range(len(ids))]
    return tuple(list(column) for column in zip(*rows, strict=True))

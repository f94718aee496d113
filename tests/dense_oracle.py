"""Attention over a forest by one square of logits: what every other form is compared with.

Importing this makes it known to transformers, as `ORACLE`.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import tiny
from laurel.data.forest import to_forest
from random_trees import groups_of_tree, seen_in

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
    """Softmax over one square of logits; who sees whom, and each position, is the oracle."""
    visible, position = oracle
    distance = position[:, None] - position
    visible = visible & (distance >= 0)
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
    """Who sees whom in `to_forest(groups)`, read off tree and branch, and each token's position."""
    rows = []
    for tree, group in enumerate(groups):
        trunk = len(group.trunk_ids)
        rows += [(tree, -1, position) for position in range(trunk)]
        for branch, ids in enumerate(group.branches_ids_G):
            rows += [(tree, branch, trunk + offset) for offset in range(len(ids))]
    tree, branch, position = torch.tensor(rows).unbind(1)
    mine, theirs = (slice(None), None), (None, slice(None))
    visible = tree[mine] == tree[theirs]
    return visible & ((branch[theirs] < 0) | (branch[theirs] == branch[mine])), position


def drawn_forest(shapes, seed, *, is_deep):
    """A forest of random groups, or of a random tree with some of them; and its oracle."""
    if is_deep:
        groups, _ = groups_of_tree(seed, nodes=12, depth=4, shapes=shapes)
        forest = to_forest(groups, least_shared=1)
        return forest, seen_in(forest)
    groups = tiny.random_groups(seed, shapes)
    return to_forest(groups), oracle_of(groups)

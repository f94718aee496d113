"""Random sequences that begin alike, as trees of any depth, and what each of them must give."""

from __future__ import annotations

import numpy as np
import torch

import tiny
from laurel.types import TokenGroup


def groups_of_tree(seed, *, nodes=40, depth=6, longest=12, vocabulary=300, shapes=((9, [4, 4]),)):
    """Groups whose sequences make a random tree, then groups of other shapes.

    Every node begins with a token of its own among its siblings, so the tree has all `nodes`.
    Sequences end at every leaf, at every node with one child and at some others, and one comes
    twice. Their completions begin anywhere.
    """
    rng = np.random.default_rng(seed)
    parents, depths, runs = [-1], [0], []
    for node in range(1, nodes):
        deep = [n for n in range(node) if depths[n] < depth]
        # One path to the depth, and then rather from the latest, or the trees would be bushes.
        is_latest = node <= depth or rng.random() < 0.5
        parents.append(deep[-1] if is_latest else int(rng.choice(deep)))
        depths.append(depths[parents[node]] + 1)
    for node in range(nodes):
        length = int(rng.integers(1 if node else 2, longest + 1))
        ids = rng.integers(3, vocabulary, length).astype(np.int32)
        ids[0] = 3 + node  # no two siblings begin alike
        runs.append(ids)
    # A node with one child would be one with it if no sequence ended there.
    ends = [n for n in range(nodes) if parents.count(n) < 2 or rng.random() < 0.2]
    groups = []
    for end in [*rng.permutation(ends).tolist(), ends[0]]:
        path, node = [], end
        while node >= 0:
            path.append(runs[node])
            node = parents[node]
        ids = np.concatenate(path[::-1])
        start = int(rng.integers(1, len(ids)))
        groups.append(_group(ids[:start], ids[start:]))
    groups += [
        _group(
            rng.integers(3, vocabulary, trunk).astype(np.int32),
            *(rng.integers(3, vocabulary, n).astype(np.int32) for n in branches),
        )
        for trunk, branches in shapes
    ]
    return groups, nodes


def dialogues():
    """Rows of three dialogues, each going on from the last, which begin with the same 20 tokens."""
    start, *turns = (one.trunk_ids for one in tiny.random_groups(3, [(20, [1])] + [(30, [1])] * 12))
    groups, row = [], 0
    for dialogue in range(3):
        ids = start
        for turn in range(3):
            answers = tuple(turns[4 * dialogue + turn][first:] for first in (0, 5 + turn))
            groups.append(TokenGroup(id=str(row), trunk_ids=ids, branches_ids_G=answers))
            ids, row = np.concatenate((ids, answers[0])), row + 1
    order = [4, 0, 8, 6, 1, 3, 7, 5, 2]
    return [groups[i] for i in order]


def alike():
    """Groups whose completions begin alike, at two depths, and one without a beginning in common.

    The first tokens of all prompts are the same 20.
    """
    lengths = [20, 6, 18, 25, *range(3, 9), 9, 17, 4, 11, 2, 40, 5, 7]
    parts = [one.trunk_ids for one in tiny.random_groups(4, [(n, [1]) for n in lengths])]
    start, asked, said, more, *ends = parts
    return [
        _group(
            np.concatenate((start, asked)),
            *(np.concatenate((said, end)) for end in ends[:3]),
            *(np.concatenate((said, more, end)) for end in ends[3:7]),
            ends[7],
        ),
        _group(start, *(np.concatenate((more, end)) for end in ends[8:11])),
        _group(ends[11], *ends[12:]),
    ]


def _group(trunk, *branches):
    return TokenGroup(id="", trunk_ids=trunk, branches_ids_G=branches)


def rows_of(forest):
    """The indices in the row of every sequence, by the parents alone."""
    rows = []
    for end in forest.ends_N:
        tree, node, row = forest.trees[end.tree], end.node, []
        while node >= 0:
            row = [*range(*tree.nodes[node]), *row]
            node = tree.parents[node]
        rows.append(row)
    return rows


def seen_in(forest):
    """Who sees whom: each token those before it in any sequence that holds it; and positions."""
    visible = torch.zeros(len(forest.ids_T), len(forest.ids_T), dtype=torch.bool)
    position = torch.zeros(len(forest.ids_T), dtype=torch.int64)
    for row in rows_of(forest):
        index = torch.tensor(row)
        visible[index[:, None], index] |= torch.ones(len(row), len(row), dtype=torch.bool).tril()
        position[index] = torch.arange(len(row))
    return visible, position

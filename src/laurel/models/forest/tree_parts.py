"""Divides the trees of a forest into parts that fit into one pass of a model each.

A part continues its path: the tokens from a root to the node that it hangs below, which belong to
earlier parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laurel.types import Span, Tree


class PathSpan(NamedTuple):
    """Adjacent tokens of a path."""

    part: int
    """The part that they belong to."""
    span: Span
    """Their places among the tokens of that part."""


class Part(NamedTuple):
    """Tokens that one pass computes: subtrees that hang below the same token, or whole trees."""

    path: tuple[PathSpan, ...]
    """The tokens above all of its own, from the root on; the last is the parent of its subtrees.
    Empty: it consists of whole trees, or of their beginnings."""
    spans: tuple[Span, ...]
    """Its own tokens, as spans of the forest's row, in order."""
    trees: tuple[Tree, ...]
    """The arrangement of its own tokens; with a path one tree, whose root is the path."""

    @property
    def parent(self) -> int:
        """Index of the part that its path ends in; -1: it has no path."""
        return self.path[-1].part if self.path else -1


def parts_of(trees: Sequence[Tree], budget: int) -> list[Part]:
    """Divide trees into parts.

    Where the tokens of a subtree exceed the budget, its root is one part with what is above it, as
    far as that fits, and the subtrees below it make further parts. A run of tokens that exceeds the
    budget by itself becomes a chain of parts.

    Args:
        budget: The largest number of tokens of a part, without its path.

    Returns:
        The parts, in depth-first order: a part directly follows its parent, or what its parent's
        earlier children have below them.
    """
    runs, parents = _pieces(trees, budget)
    # The children that are computed with a run, and those that later parts compute, part by part.
    kept: list[list[int]] = [[] for _ in runs]
    below: list[list[list[int]]] = [[] for _ in runs]
    sizes = [run.length for run in runs]
    roots: list[int] = []
    for index in range(len(runs) - 1, -1, -1):
        children = kept[index][::-1]
        total = sizes[index] + sum(sizes[child] for child in children)
        if total > budget:
            below[index] = _filled(children, sizes, budget)
            kept[index] = []
        else:
            kept[index], sizes[index] = children, total
        (roots if parents[index] < 0 else kept[parents[index]]).append(index)
    roots.reverse()
    places: dict[int, PathSpan] = {}
    parts: list[Part] = []
    waiting = [(-1, some) for some in reversed(_filled(roots, sizes, budget))]
    while waiting:
        above, heads = waiting.pop()
        path: list[PathSpan] = []
        while above >= 0:
            path.append(places[above])
            above = parents[above]
        path.reverse()
        own: list[int] = []
        for head in heads:
            stack = [head]
            while stack:
                own.append(stack.pop())
                stack += reversed(kept[own[-1]])
        parts.append(_part(path, own, len(parts), runs, parents, places))
        for run in reversed(own):
            waiting += [(run, some) for some in reversed(below[run])]
    return parts


def _filled(runs: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    # Adjacent subtrees that fit together.
    bins: list[list[int]] = []
    room = 0
    for run in runs:
        if not bins or sizes[run] > room:
            bins.append([])
            room = budget
        bins[-1].append(run)
        room -= sizes[run]
    return bins


def _pieces(trees: Sequence[Tree], budget: int) -> tuple[list[Span], list[int]]:
    # The runs of all trees, those above the budget as chains of even pieces, and their parents.
    # What hangs below an empty root begins trees of its own.
    runs: list[Span] = []
    parents: list[int] = []
    for tree in trees:
        last: list[int] = []  # piece of each node
        for span, parent in zip(tree.nodes, tree.parents, strict=True):
            above = last[parent] if parent >= 0 else -1
            count = -(-span.length // budget)
            for number in range(count):
                start = span.start + number * span.length // count
                end = span.start + (number + 1) * span.length // count
                runs.append(Span(start, end))
                parents.append(above)
                above = len(runs) - 1
            last.append(above)
    return runs, parents


def _part(
    path: Sequence[PathSpan],
    own: Sequence[int],
    number: int,
    runs: Sequence[Span],
    parents: Sequence[int],
    places: dict[int, PathSpan],
) -> Part:
    given = sum(one.span.length for one in path)
    nodes: list[list[Span]] = [[Span(0, given)]] if path else []
    above: list[list[int]] = [[-1]] if path else []
    indices: dict[int, int] = {}
    end = given
    for run in own:
        if not path and parents[run] < 0:
            nodes.append([])
            above.append([])
        parent = indices.get(parents[run], 0 if path else -1)
        indices[run] = len(nodes[-1])
        nodes[-1].append(Span(end, end + runs[run].length))
        above[-1].append(parent)
        places[run] = PathSpan(number, Span(end - given, end - given + runs[run].length))
        end += runs[run].length
    return Part(
        tuple(path),
        tuple(runs[run] for run in own),
        tuple(Tree(tuple(n), tuple(p)) for n, p in zip(nodes, above, strict=True)),
    )

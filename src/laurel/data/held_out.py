"""Which prompts are held out: a share of the rows, whole prompts, alike on any machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

from laurel.errors import DataError
from laurel.observe.counts import counted

Item = TypeVar("Item")


def split(
    items: Sequence[Item], prompts: Sequence[bytes], held_out: Collection[bytes]
) -> tuple[list[Item], list[Item]]:
    """The items that stay and those whose prompt is held out; `prompts` are their fingerprints."""
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item, prompt in zip(items, prompts, strict=True):
        sides[prompt in held_out].append(item)
    return sides


def held_out_prompts(prompts: Sequence[bytes], *, share: float, seed: int) -> set[bytes]:
    """The prompts, of one fingerprint per row, that about `share` of the rows have.

    The order in which prompts are taken is drawn from the seed and the prompt alone, so the order
    of the rows does not matter. At least one is taken and one is left. Raises DataError where there
    are fewer than two different prompts.
    """
    counts = Counter(prompts)
    if len(counts) < 2:
        raise DataError(
            f"data.split_validation_size={share:g}: {counted(len(prompts), 'row')} with "
            f"{counted(len(counts), 'different prompt')} cannot be split, as rows with the same "
            "prompt stay on one side. Name a validation set instead (data.val_data_path), or set "
            "data.split_validation_size=0"
        )
    key = seed.to_bytes(16, "little", signed=True)
    drawn = sorted(counts, key=lambda prompt: hashlib.blake2b(prompt, key=key).digest())
    wanted = share * len(prompts)
    held_out: set[bytes] = set()
    num_held_out = 0
    for prompt in drawn[:-1]:
        after = num_held_out + counts[prompt]
        if abs(after - wanted) < abs(num_held_out - wanted):
            held_out.add(prompt)
            num_held_out = after
    if not held_out:
        held_out.add(min(drawn, key=lambda prompt: counts[prompt]))
    return held_out

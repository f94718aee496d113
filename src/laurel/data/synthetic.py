"""Preference data made here, for demos and tests: errands done well or badly.

The prompt asks for a thing from a place; a good answer brings that thing from that place, a bad
one brings something else, goes somewhere else, or is rude. Whether an answer is good cannot be
told without the prompt, so a model has to compare the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

THINGS = ("apple", "blanket", "candle", "drum", "envelope", "fiddle", "glove", "hammer", "inkwell",
          "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pillow")  # fmt: skip
PLACES = ("attic", "barn", "cellar", "garden", "harbour", "kitchen", "library", "market")
REQUESTS = ("Please bring me the {thing} from the {place}.", "Fetch the {thing} from the {place}.",
            "I need the {thing}; it is in the {place}.")  # fmt: skip
GOOD = ("Here is the {thing} from the {place}.", "I went to the {place} and got the {thing}.")
RUDE = ("Get the {thing} yourself.", "I do not feel like going to the {place}.")


def errands(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows `{"prompt", "chosen", "rejected"}`.

    Args:
        count: How many.
        seed: Draws them.
        held_out: Whether the prompts are those that never occur otherwise: a sixth of them, each
            asking for a thing from a place in one of three ways.
    """
    generator = random.Random(f"{seed}-{held_out}")
    prompts = [
        (request, thing, place)
        for t, thing in enumerate(THINGS)
        for p, place in enumerate(PLACES)
        for r, request in enumerate(REQUESTS)
        if ((t + p + 2 * r) % 6 == 0) == held_out
    ]
    for _ in range(count):
        request, thing, place = generator.choice(prompts)
        names = {"thing": thing, "place": place}
        yield {
            "prompt": request.format(**names),
            "chosen": generator.choice(GOOD).format(**names),
            "rejected": _bad_answer(generator, names),
        }


def _bad_answer(generator: random.Random, names: dict[str, str]) -> str:
    kind = generator.randrange(3)
    if kind == 0:
        return generator.choice(RUDE).format(**names)
    key, choices = ("thing", THINGS) if kind == 1 else ("place", PLACES)
    other = generator.choice([name for name in choices if name != names[key]])
    return generator.choice(GOOD).format(**{**names, key: other})

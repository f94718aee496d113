"""A task made here, for demos and tests: numbers in words, to be written in digits.

An answer is right when its box holds the number, which the math environment checks. Who shows how
it is done is often careless and gets a digit wrong; the answers that a reward model is to tell from
right ones are wrong in more ways, since a policy that learns from it will try them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

FIRST, LAST = 100, 999
UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
         "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
         "nineteen")  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
REQUESTS = ("Write {} in digits.", "What is {} in digits?", "{} as a number, please.")
NUM_HELD_OUT = 90
"""Numbers that no training row contains."""


def in_words(number: int) -> str:
    """A number from 0 to 999 in words, e.g. `three hundred forty-two`."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return f"{TENS[tens]}-{UNITS[unit]}" if unit else TENS[tens]
    hundreds, rest = divmod(number, 100)
    return f"{UNITS[hundreds]} hundred" + (f" {in_words(rest)}" if rest else "")


def boxed(content: object) -> str:
    """An answer in the form that is asked for, e.g. `\\boxed{342}`."""
    return f"\\boxed{{{content}}}"


def numbers(*, held_out: bool) -> Sequence[int]:
    """The numbers that training rows are about, or those that none of them is about."""
    everything = range(FIRST, LAST + 1)
    kept_back = set(random.Random(0).sample(everything, NUM_HELD_OUT))
    return [number for number in everything if (number in kept_back) == held_out]


def held_out_tasks() -> Iterator[dict[str, Any]]:
    """Rows `{"input", "output"}`: every request for every held-out number."""
    for number in numbers(held_out=True):
        for request in REQUESTS:
            yield {"input": request.format(in_words(number)), "output": str(number)}


def prompts(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Rows `{"input", "output"}` for training."""
    for _, prompt, number in _drawn(count, seed, "prompts", held_out=False):
        yield {"input": prompt, "output": str(number)}


def demonstrations(count: int, *, seed: int, share_wrong: float) -> Iterator[dict[str, Any]]:
    """Rows `{"messages"}` for fine-tuning, some of which show a wrong digit.

    Args:
        count: How many.
        seed: Draws them.
        share_wrong: Probability that a row is wrong.
    """
    for generator, prompt, number in _drawn(count, seed, "demonstrations", held_out=False):
        is_wrong = generator.random() < share_wrong
        answer = boxed(_one_digit_off(generator, number) if is_wrong else number)
        yield {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        }


def preferences(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows `{"prompt", "chosen", "rejected"}`: the right answer against a wrong one.

    Args:
        count: How many.
        seed: Draws them.
        held_out: Whether they are about held-out numbers.
    """
    for generator, prompt, number in _drawn(count, seed, "preferences", held_out=held_out):
        yield {
            "prompt": prompt,
            "chosen": boxed(number),
            "rejected": _wrong_answer(generator, number),
        }


def _drawn(
    count: int, seed: int, purpose: str, *, held_out: bool
) -> Iterator[tuple[random.Random, str, int]]:
    generator = random.Random(f"{seed}-{purpose}-{held_out}")
    choices = numbers(held_out=held_out)
    for _ in range(count):
        number = generator.choice(choices)
        yield generator, generator.choice(REQUESTS).format(in_words(number)), number


def _one_digit_off(generator: random.Random, number: int) -> int:
    """A three-digit number that differs in one place."""
    digits = list(str(number))
    place = generator.randrange(len(digits))
    digits[place] = generator.choice(
        [d for d in "0123456789" if d != digits[place] and (place > 0 or d != "0")]
    )
    return int("".join(digits))


def _wrong_answer(generator: random.Random, number: int) -> str:
    kind = generator.random()
    if kind < 0.7:
        return boxed(_one_digit_off(generator, number))
    if kind < 0.85:
        return boxed(generator.choice([n for n in range(FIRST, LAST + 1) if n != number]))
    text = str(number)
    return generator.choice(
        (text, boxed(text[:2]), boxed(text + generator.choice("0123456789")), f"\\boxed{{{text}",
         boxed(""), boxed(text) + boxed(_one_digit_off(generator, number)))
    )  # fmt: skip

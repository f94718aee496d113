"""Generates data for demos and tests: preferences, code tasks, and numbers in words.

The prompt of a preference asks for a thing from a place. A good answer brings that thing from that
place; a bad one brings something else, goes somewhere else, or is rude. An answer cannot be rated
without the prompt, so a model must compare the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal

from laurel.models.tool_calls import FORMS, ToolCall

THINGS = (
    "apple",
    "blanket",
    "candle",
    "drum",
    "envelope",
    "fiddle",
    "glove",
    "hammer",
    "inkwell",
    "jacket",
    "kettle",
    "ladder",
    "mirror",
    "needle",
    "orange",
    "pillow",
)
PLACES = ("attic", "barn", "cellar", "garden", "harbour", "kitchen", "library", "market")
REQUESTS = (
    "Please bring me the {thing} from the {place}.",
    "Fetch the {thing} from the {place}.",
    "I need the {thing}; it is in the {place}.",
)
GOOD = ("Here is the {thing} from the {place}.", "I went to the {place} and got the {thing}.")
RUDE = ("Get the {thing} yourself.", "I do not feel like going to the {place}.")


def errands(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield preferences, rows `{"prompt", "chosen", "rejected"}`, about fetching things.

    A prompt asks for a thing from a place. The chosen answer brings it from there; the rejected one
    brings another thing, goes to another place, or is rude.

    Args:
        held_out: Whether to use the sixth of all prompts that is reserved for validation, instead
            of the other five sixths.
    """
    generator = random.Random(f"{seed}-{held_out}")
    # Split by a rule, not by chance: both sides hold every thing, place and form of request.
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


# A generated task for recipes and tests: functions of one line, tested by calling them.
#
# A sentence names a function and its operation on a number. Demonstrations are often careless, and
# use another operation or number: a model that is warmed up on them knows how a function is
# written, and has to find out from the tests which one.

Sign = Literal["+", "-", "*"]
OPERATIONS: dict[str, Sign] = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS = range(2, 22)
NAMES = ("f", "g", "h")
CODE_REQUESTS = ("Write {name}(x): x {word} {number}.", "{name}(x) should give x {word} {number}.")
ARGUMENTS = (0, 1, 7, -3)
"""The arguments of the tests; any two functions differ on at least one of them."""
NUM_HELD_OUT = 60
"""The number of the 360 requests that are in no training row."""


class FunctionTasks:
    """A data set of code tasks, for `data.dataset_name=laurel.demo.data.FunctionTasks`.

    Each row has `messages` with a demonstrated answer, for fine-tuning, and `entry`, `call_tests`
    and `reference_solution`, for `data.processor=code_data_processor`. `formatted_ds` holds the
    rows of each split: `train`, and `validation` with the held-out requests and right answers.
    """

    def __init__(self, seed: int = 0, count: int = 6000, share_wrong: float = 0.6) -> None:
        """Generate the rows.

        Args:
            count: The number of rows of the split `train`.
            share_wrong: The probability that a training row has a wrong answer.
        """
        requests = list(product(CODE_REQUESTS, NAMES, OPERATIONS, NUMBERS))
        # The seed is fixed: runs of all seeds are measured on the same requests.
        kept_back = set(random.Random(0).sample(range(len(requests)), NUM_HELD_OUT))
        known = [one for place, one in enumerate(requests) if place not in kept_back]
        generator, rows = random.Random(f"{seed}-functions"), []
        for _ in range(count):
            request = generator.choice(known)
            right = shown = request[2:]
            if generator.random() < share_wrong:
                while shown == right:
                    shown = (generator.choice(list(OPERATIONS)), generator.choice(NUMBERS))
            rows.append(_function_task(*request, shown))
        held_out = [_function_task(*requests[i], requests[i][2:]) for i in sorted(kept_back)]
        self.formatted_ds = {"train": rows, "validation": held_out}


def _function_task(
    text: str, name: str, word: str, number: int, shown: tuple[str, int]
) -> dict[str, Any]:
    expected = [calculate(x, OPERATIONS[word], number) for x in ARGUMENTS]
    return {
        "messages": [
            {"role": "user", "content": text.format(name=name, word=word, number=number)},
            {"role": "assistant", "content": _function(name, *shown)},
        ],
        "entry": name,
        "call_tests": [
            {"args": [x], "expected": y} for x, y in zip(ARGUMENTS, expected, strict=True)
        ],
        "reference_solution": _function(name, word, number),
    }


def _function(name: str, word: str, number: int) -> str:
    return f"def {name}(x): return x {OPERATIONS[word]} {number}"


# A generated task for demos and tests: numbers in words, to be written in digits.
#
# An answer is right when its box holds the number, which the math environment checks.
# Demonstrations are often careless and get a digit wrong; the rejected answers of preferences are
# wrong in more ways, since a policy that learns from a reward model will try them.

FIRST, LAST = 100, 999
UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_REQUESTS = ("Write {} in digits.", "What is {} in digits?", "{} as a number, please.")
NUM_HELD_OUT_NUMBERS = 90
"""How many of the numbers occur in no training row."""


def in_words(number: int) -> str:
    """Return a number from 0 to 999 in words, e.g. `three hundred forty-two`."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return f"{TENS[tens]}-{UNITS[unit]}" if unit else TENS[tens]
    hundreds, rest = divmod(number, 100)
    return f"{UNITS[hundreds]} hundred" + (f" {in_words(rest)}" if rest else "")


def boxed(content: object) -> str:
    """Write an answer in the required form, e.g. `\\boxed{342}`."""
    return f"\\boxed{{{content}}}"


def numbers(*, held_out: bool) -> Sequence[int]:
    """Return the numbers of training rows, or the held-out ones."""
    everything = range(FIRST, LAST + 1)
    # The seed is fixed: runs of all seeds are measured on the same numbers.
    kept_back = set(random.Random(0).sample(everything, NUM_HELD_OUT_NUMBERS))
    return [number for number in everything if (number in kept_back) == held_out]


def held_out_tasks() -> Iterator[dict[str, Any]]:
    """Yield validation rows `{"input", "output"}`: every request for every held-out number."""
    for number in numbers(held_out=True):
        for request in NUMBER_REQUESTS:
            yield {"input": request.format(in_words(number)), "output": str(number)}


def prompts(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield training rows `{"input", "output"}`: a random request for a random training number."""
    for _, prompt, number in _sampled(count, seed, "prompts", held_out=False):
        yield {"input": prompt, "output": str(number)}


def demonstrations(count: int, *, seed: int, share_wrong: float) -> Iterator[dict[str, Any]]:
    """Yield rows `{"messages"}` for fine-tuning, some of which have a wrong digit.

    Args:
        share_wrong: The probability that a row is wrong.
    """
    for generator, prompt, number in _sampled(count, seed, "demonstrations", held_out=False):
        is_wrong = generator.random() < share_wrong
        answer = boxed(_one_digit_off(generator, number) if is_wrong else number)
        yield {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        }


def preferences(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield preferences, rows `{"prompt", "chosen", "rejected"}`, of right over wrong answers.

    Args:
        held_out: Whether the rows are about held-out numbers.
    """
    for generator, prompt, number in _sampled(count, seed, "preferences", held_out=held_out):
        yield {
            "prompt": prompt,
            "chosen": boxed(number),
            "rejected": _wrong_answer(generator, number),
        }


def _sampled(
    count: int, seed: int, purpose: str, *, held_out: bool
) -> Iterator[tuple[random.Random, str, int]]:
    generator = random.Random(f"{seed}-{purpose}-{held_out}")
    choices = numbers(held_out=held_out)
    for _ in range(count):
        number = generator.choice(choices)
        yield generator, generator.choice(NUMBER_REQUESTS).format(in_words(number)), number


def _one_digit_off(generator: random.Random, number: int) -> int:
    digits = list(str(number))
    place = generator.randrange(len(digits))
    digits[place] = generator.choice(
        [d for d in "0123456789" if d != digits[place] and (place > 0 or d != "0")]
    )
    return int("".join(digits))


def _wrong_answer(generator: random.Random, number: int) -> str:
    # Mostly one wrong digit, the policy's likeliest error; else other numbers, and broken forms.
    kind = generator.random()
    if kind < 0.7:
        return boxed(_one_digit_off(generator, number))
    if kind < 0.85:
        return boxed(generator.choice([n for n in range(FIRST, LAST + 1) if n != number]))
    text = str(number)
    return generator.choice(
        (
            text,
            boxed(text[:2]),
            boxed(text + generator.choice("0123456789")),
            f"\\boxed{{{text}",
            boxed(""),
            boxed(text) + boxed(_one_digit_off(generator, number)),
        )
    )


# A generated task for recipes and tests: sums and products, with a calculator as a tool.
#
# Most demonstrations guess a result, and are wrong; some call the calculator and copy what it says.
# The policy has to find out that calling pays.

OPERANDS = range(1, 10)
NUM_HELD_OUT_SUMS = 40


def calculate(left: int, sign: Sign, right: int) -> int:
    """Calculate with two numbers.

    Args:
        left: The first number.
        sign: What to do.
        right: The second number.
    """
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


class CalculatorTasks:
    """A data set of sums, for `data.dataset_name=laurel.demo.data.CalculatorTasks`.

    `formatted_ds` holds rows `{"input", "output"}` under the splits `train` and `validation`, and
    rows `{"messages", "tools"}` for fine-tuning under `demonstrations` and `shown`. No sum of
    `validation`, whose right answers `shown` demonstrates, is in another split.
    """

    def __init__(self, seed: int = 0, count: int = 6000, share_calling: float = 0.4) -> None:
        """Generate the rows.

        Args:
            count: The number of rows of the split `demonstrations`.
            share_calling: The probability that one of these calls the calculator.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        tools, generator = [get_json_schema(calculate)], random.Random(f"{seed}-sums")
        sums = list(product(OPERANDS, OPERATIONS, OPERANDS))
        # The seed is fixed: runs of all seeds are measured on the same sums.
        kept_back = sorted(random.Random(0).sample(sums, NUM_HELD_OUT_SUMS))
        known = sorted(set(sums) - set(kept_back))
        self.formatted_ds = {
            "train": [_sum_task(*one) for one in known],
            "validation": [_sum_task(*one) for one in kept_back],
            "demonstrations": [
                _sum_shown(*generator.choice(known), tools, generator, share_calling)
                for _ in range(count)
            ],
            "shown": [_sum_shown(*one, tools, generator, 1.0) for one in kept_back],
        }


def _sum_task(left: int, word: str, right: int) -> dict[str, Any]:
    result = calculate(left, OPERATIONS[word], right)
    return {"input": f"What is {left} {word} {right}?", "output": str(result)}


def _sum_shown(
    left: int,
    word: str,
    right: int,
    tools: list[Any],
    generator: random.Random,
    share_calling: float,
) -> dict[str, Any]:
    task = _sum_task(left, word, right)
    said, shown = [{"role": "user", "content": task["input"]}], str(generator.randrange(100))
    if generator.random() < share_calling:
        arguments = {"left": left, "sign": OPERATIONS[word], "right": right}
        call = FORMS["hermes"].write([ToolCall("calculate", arguments)])
        shown = task["output"]
        said.append({"role": "assistant", "content": call})
        said.append({"role": "tool", "content": shown})
    said.append({"role": "assistant", "content": boxed(shown)})
    return {"messages": said, "tools": tools}

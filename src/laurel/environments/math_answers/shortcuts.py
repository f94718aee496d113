"""What can be told of two answers without a parser, exactly and in microseconds."""

from __future__ import annotations

import re
from fractions import Fraction

from laurel.environments.math_answers.verdicts import Candidate

LARGEST_EXPONENT = 99_999
"""An exponent or a factorial beyond it makes a number that nobody means to be evaluated."""

_WRAPPING = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_IGNORED = re.compile(r"\\[,;:!]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\s+")
_WHOLE = r"\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)
    (?: (?P<whole>{_WHOLE})?(?P<decimals>\.\d+)
      | (?:(?P<mixed>\d+)\s*)?\\[dt]?frac\s*
        (?:\{{(?P<n>\d+)\}}\s*\{{(?P<d>\d+)\}} | (?P<n1>\d)\s*(?P<d1>\d))
      | (?:(?P<mixed2>\d+)\s+)?(?P<n2>\d+)\s*/\s*(?P<d2>\d+)
      | (?P<integer>{_WHOLE})
    )""",
    re.VERBOSE,
)
_LONGEST_NUMBER = 60
_IN_BASE = re.compile(r"[+-]?[0-9A-Za-z]+_(?:\{(\d{1,3})\}|(\d))")
_SAID_LAST = re.compile(
    r"(?:answer\s+is\s*:?|answer\s*:|####)\s*\$?\s*([+-]?[\d.,/]*\d)\s*\$?\s*\.?\Z", re.IGNORECASE
)


def same_or_not(gold: str, candidate: Candidate) -> bool | None:
    """Whether an answer is the known one; None where that takes a parser.

    Equal texts are equal. Two exact numbers are compared as such; an inexact decimal is left to the
    parser, which rounds.
    """
    text = candidate.text
    if not candidate.boxed:
        said = _SAID_LAST.search(text)
        if said is None:
            return None
        text = said[1]
    if bare(gold) == bare(text):
        return True
    if base_of(gold) != base_of(text) and None not in (base_of(gold), base_of(text)):
        return False  # the parser does not read bases
    known, given = exact_number(gold), exact_number(text)
    if known is None or given is None:
        return None
    if known == given:
        return True
    return None if "." in gold or "." in text else False


def base_of(text: str) -> int | None:
    """The base that a number says it is written in, as in `110_2`."""
    written = _IN_BASE.fullmatch(bare(text).replace(" ", ""))
    return None if written is None else int(written[1] or written[2])


def bare(text: str) -> str:
    """The text without what only changes how it looks."""
    text = _unwrapped(text)
    return _IGNORED.sub(" ", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")).strip()


def _unwrapped(text: str) -> str:
    text = text.strip().removesuffix(".").strip()
    for opening, closing in _WRAPPING:
        inside = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inside and "$" not in inside:
            return inside.strip()
    return text


def exact_number(text: str) -> Fraction | None:
    """The value of a plain integer, decimal, fraction or mixed number."""
    text = _unwrapped(text).removeprefix(r"\$").strip()
    if len(text) > _LONGEST_NUMBER:
        return None
    number = _NUMBER.fullmatch(text)
    if number is None:
        return None
    sign = -1 if number["sign"] == "-" else 1
    if number["decimals"]:
        return sign * Fraction(_digits(number["whole"] or "0") + number["decimals"])
    if number["integer"]:
        return sign * Fraction(_digits(number["integer"]))
    numerator = number["n"] or number["n1"] or number["n2"]
    denominator = int(number["d"] or number["d1"] or number["d2"])
    if denominator == 0:
        return None
    whole = number["mixed"] or number["mixed2"] or "0"
    return sign * (int(whole) + Fraction(int(numerator), denominator))


def _digits(text: str) -> str:
    return text.replace("{,}", "").replace(",", "")


# ------------------------------------------------------------------------------------------- towers

_POWER = re.compile(r"\*\*|\^")
_GROUP = {"{": "}", "(": ")"}
_PLAIN_POWER = re.compile(r"(\d+)(?:\*\*|\^)(.+)", re.DOTALL)
_LONGEST_EXPONENT = 200
_LONG_FACTORIAL = re.compile(r"(?:\d{6,}|[)}])\s*!")


def is_absurd(text: str) -> bool:
    """Whether a number is asked for that would fill the memory: a tower of powers of numbers, an
    exponent or a factorial of more than five digits, a factorial of a power.

    Powers of letters are none of these, and small towers (2^{2^3}) are left alone.
    """
    compact = "".join(text.split())
    for power in _POWER.finditer(compact):
        exponent = _operand(compact, power.end())
        if not re.search(r"[a-zA-Z]", exponent) and _size(exponent) > LARGEST_EXPONENT:
            return True
    factorial = _LONG_FACTORIAL.search(compact)
    if factorial is None:
        return False
    return factorial[0][0].isdigit() or _POWER.search(compact[: factorial.start()]) is not None


def _operand(text: str, start: int) -> str:
    """What stands to the right of a power: a group, or a number and the powers on it."""
    closing = _GROUP.get(text[start : start + 1])
    if closing is None:
        # `^12` is `^{1}2` to LaTeX; read here as a person means it, which only errs to the larger.
        match = re.match(r"-?\d+(?:(?:\*\*|\^).+)?", text[start:], re.DOTALL)
        return match[0] if match else ""
    opening, depth = text[start], 0
    for position in range(start, len(text)):
        depth += {opening: 1, closing: -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return text[start + 1 :]


def _size(exponent: str) -> float:
    """About how large an exponent of numbers is; infinite where that is past telling."""
    if len(exponent) > _LONGEST_EXPONENT:
        return float("inf")
    exponent = exponent.strip("{}()").lstrip("-")
    if exponent.isdecimal():
        return float(int(exponent)) if len(exponent) <= 12 else float("inf")
    power = _PLAIN_POWER.match(exponent)
    if power is None:
        return float("inf") if _POWER.search(exponent) or "!" in exponent else 0.0
    above = _size(_operand(power[2], 0) or power[2])
    if above > 20 or len(power[1]) > 6:
        return float("inf") if int(power[1][:7]) > 1 else 1.0
    return float(int(power[1]) ** int(above))

"""The answer in a response. Needs nothing but the standard library: workers import it too."""

from __future__ import annotations

import re
import unicodedata

from laurel.environments.math_answers.verdicts import Candidate

MAX_CHARACTERS = 2_000
"""Longest answer that is looked at, and how much of the end of a response without a box."""
MAX_NESTING = 200
"""Deepest braces and brackets of an answer that is looked at."""

END_OF_THINKING = re.compile(
    r"</think(?:ing)?>|</thought>|</reason(?:ing)?>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
    r"|<\|/think\|>|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?<=\s)(?:\\[a-zA-Z]+|[^\s{}$\\]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_PHRASE = re.compile(
    r"(?:final\s+answer|the\s+answer|answer\s+is|answer\s*:|####)", re.IGNORECASE
)

_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
           "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8",
           "⅞": "7/8", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10"}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "﹣": "-", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ",
     "⋅": r"\cdot ", "÷": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
     "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∫": r"\int ", "∑": r"\sum ",
     "∏": r"\prod ", "°": r"^\circ ", "±": r"\pm ", "\u00a0": " ", "\u200b": "", "\ufeff": ""}
)  # fmt: skip
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")


def read_answer(response: str) -> Candidate | None:
    """What a response gives as its answer; None where it gives none.

    Only what comes after the last end of thinking counts. In it, the last closed `\\boxed{}` is the
    answer. Without a box, it is looked for in the end of the text, or where the text last speaks of
    "the answer" if that is earlier.
    """
    text = response[last_end(END_OF_THINKING, response) :]
    boxed = last_box(text)
    if boxed is not None:
        boxed = in_known_characters(boxed).strip()
        return Candidate(text=boxed) if boxed else None
    passage = in_known_characters(_passage(text)).strip()
    return Candidate(text=passage, boxed=False) if passage else None


def last_end(pattern: re.Pattern[str], text: str) -> int:
    """Where the last match ends; 0 where there is none."""
    end = 0
    for match in pattern.finditer(text):
        end = match.end()
    return end


def last_box(text: str) -> str | None:
    """What the last box that is closed holds."""
    boxes = list(_BOX.finditer(text))
    closing = _closing_braces(text, boxes[0].start()) if boxes else {}
    for box in reversed(boxes):
        if box[1] != "{":
            return box[1]
        if box.start(1) in closing:
            return text[box.end() : closing[box.start(1)]]
    return None


def _closing_braces(text: str, start: int) -> dict[int, int]:
    """Where each brace closes that is opened from `start` on; `\\{` and `\\}` are characters.

    One pass for all of them: a response may hold a box on every line.
    """
    opened: list[int] = []
    closing: dict[int, int] = {}
    for mark in _BRACE.finditer(text, start):
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened:
            closing[opened.pop()] = mark.start()
    return closing


def _passage(text: str) -> str:
    """Where an answer without a box is looked for."""
    text = text.rstrip()
    if len(text) <= MAX_CHARACTERS:
        return text
    start = len(text) - MAX_CHARACTERS
    phrases = [match.start() for match in _ANSWER_PHRASE.finditer(text)]
    if phrases and phrases[-1] < start:
        line = text[phrases[-1] :].split("\n", 1)[0]
        return line[:MAX_CHARACTERS]
    # From a new line on: a formula cut in two would turn all dollar signs after it inside out.
    newline = text.find("\n", start)
    return text[newline + 1 :] if newline >= 0 else text[start:]


def in_known_characters(text: str) -> str:
    """The text with look-alikes, full-width forms and typographic mathematics spelled plainly.

    NFKC alone would turn 10² into 102 and 1½ into 11/2, so those are spelled out first.
    """
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
    for vulgar, plain in _VULGAR.items():
        numerator, denominator = plain.split("/")
        text = text.replace(vulgar, rf"\frac{{{numerator}}}{{{denominator}}}")
    text = text.translate(_SIGNS)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    return _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)


def too_much_to_read(text: str) -> bool:
    """Whether an answer is longer or deeper than any honest one."""
    if len(text) > MAX_CHARACTERS:
        return True
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest > MAX_NESTING


_UNEVALUATED = re.compile(r"\\(?:i{0,3}int|oint|sum|prod|coprod)(?![a-zA-Z])|∫|∑|∏")


def is_unevaluated(text: str) -> bool:
    """Whether an integral, a sum or a product is left to do."""
    return _UNEVALUATED.search(text) is not None

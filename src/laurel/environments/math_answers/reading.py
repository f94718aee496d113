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
    r"(?:final\s+answer|the\s+answer|answer\s+is|answer\s*:|####|答案|答え)", re.IGNORECASE
)
_EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_BESIDE_EAST_ASIAN = re.compile(
    rf"(?<=[{_EAST_ASIAN}])(?=[-+0-9A-Za-z.(\[\\$])|(?<=[0-9A-Za-z)\]}}%$])(?=[{_EAST_ASIAN}])"
)
_EAST_ASIAN_STOPS = str.maketrans({"。": ". ", "、": ", ", "｡": ". "})
_EAST_ASIAN_ANSWER = re.compile(r"(?:答案|答え)\s*(?:是|为|為|等于|等於|は|[:：])")
_END_OF_SENTENCE = re.compile(r"[。｡\n]")
_SAYS_SOMETHING = re.compile(r"[0-9A-Za-z\\$]")

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
    passage = in_known_characters(_spaced(_passage(text))).strip()
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


def _spaced(text: str) -> str:
    """The text with blanks and full stops where East Asian writing needs none.

    A number that touches a letter is no number to the parser.
    """
    return (
        text if text.isascii() else _BESIDE_EAST_ASIAN.sub(" ", text).translate(_EAST_ASIAN_STOPS)
    )


def _passage(text: str) -> str:
    """Where an answer without a box is looked for."""
    text = text.rstrip()
    said = "" if text.isascii() else _last_sentence_with_answer(text)
    if said:
        return said
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


def _last_sentence_with_answer(text: str) -> str:
    """What a Chinese or Japanese text says the answer is; the parser knows no such phrase."""
    for sentence in reversed(_END_OF_SENTENCE.split(text)):
        end = last_end(_EAST_ASIAN_ANSWER, sentence)
        if end and _SAYS_SOMETHING.search(sentence, end):
            return f"答案: {sentence[end:]}"[:MAX_CHARACTERS]
    return ""


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
_EQUALS = re.compile(r"=|\\(?:approx|equiv)(?![a-zA-Z])|≈")
_LOOKS = re.compile(
    r"\\(?:text|mathrm|textbf)\s*\{[^{}]*\}|\\(?:left|right|displaystyle|!|,|;|:| |\$|%)|\^\s*"
    r"(?:\\circ|\{\\circ\})|(?<=\d)\{,\}(?=\d)|[\s$%]"
)
_OPERATORS = (
    ("**", "^"),
    (r"\cdot", "*"),
    (r"\times", "*"),
    (r"\div", "/"),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\infty", "1"),
)
_SCIENTIFIC = re.compile(r"(?<![\d.])[\d.]+\*10\^(?:\{[-+]?\d+\}|[-+]?\d+)")
_FRACTION = re.compile(
    r"\\frac(?:\{[-+]?[\d.,!^]+\}|\d)(?:\{[-+]?[\d.,!^]+\}|\d)|(?<![\d.,])[\d.,]+/[\d.,]+"
)
_OF_NUMBERS = re.compile(r"[-+*/^!.,\d(){}\[\]]+")
_TO_DO = re.compile(r"[*/]|(?<=[\d)}\]!.])[-+]|[)}](?=\d)|(?<=[)}\d])\(")
_DEEPEST_FRACTION = 4


def is_unevaluated(text: str) -> bool:
    """Whether an integral, a sum, a product or arithmetic with plain numbers is left to do.

    A fraction, a mixed number, a power and a number such as 3*10^5 are values as they stand.
    """
    if _UNEVALUATED.search(text) is not None:
        return True
    compact = _LOOKS.sub("", text)
    for operator, plain in _OPERATORS:
        compact = compact.replace(operator, plain)
    sides = [_with_numbers_bare(side) for side in _EQUALS.split(compact)]
    numeric = [side for side in sides if _OF_NUMBERS.fullmatch(side) and re.search(r"\d", side)]
    return bool(numeric) and all(_TO_DO.search(side) for side in numeric)


def _with_numbers_bare(text: str) -> str:
    """A 1 in place of each number that is written with operators."""
    text = _SCIENTIFIC.sub("1", text)
    for _ in range(_DEEPEST_FRACTION):
        text, count = _FRACTION.subn("1", text)
        if not count:
            break
    return text.replace(r"\frac", "")  # of a fraction in which there is something to do


# ------------------------------------------------------------------------------------- inequalities

_RELATION = re.compile(
    r"(\\(?:leqslant|geqslant|leqq|geqq|leq|geq|le|ge|lt|gt)(?![a-zA-Z])|<=|>=|<|>)"
)
_OR = re.compile(r"\\(?:text|mathrm)\s*\{\s*or\s*\}|(?<!\\)\bor\b|\\(?:lor|vee|cup)(?![a-zA-Z])|或")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def solved_as_interval(text: str) -> str | None:
    """The interval that a solved inequality says its variable is in: `x<3` is `(-\\infty,3)`.

    None for anything else. An inequality that is still to be solved (`2x+1<7`) is none: it may be
    the question itself.
    """
    intervals = [_interval(part.strip().strip("$").strip()) for part in _OR.split(text)]
    return None if None in intervals else r"\cup ".join(str(one) for one in intervals)


def _interval(text: str) -> str | None:
    text = _THOUSANDS.sub("", text)
    if "," in text.replace(r"\,", "") or "=" in re.sub("[<>]=", "", text):
        return None  # more than an inequality
    sides = [side.strip() for side in _RELATION.split(text)]
    bounds, relations = sides[::2], sides[1::2]
    if len(relations) == 1 and not _is_variable(bounds[0], bounds[1]):
        # 3 > x is x < 3.
        bounds.reverse()
        relations = [_turned(relations[0])]
        if not _is_variable(bounds[0], bounds[1]):
            return None
    if len(relations) == 1:
        closes = _is_or_equal(relations[0])
        if _is_less(relations[0]):
            return rf"(-\infty,{bounds[1]}{']' if closes else ')'}"
        return rf"{'[' if closes else '('}{bounds[1]},\infty)"
    if len(relations) != 2 or _is_less(relations[0]) is not _is_less(relations[1]):
        return None
    if not _is_variable(bounds[1], f"{bounds[0]} {bounds[2]}"):
        return None
    if not _is_less(relations[0]):
        bounds.reverse()
        relations.reverse()
    opening = "[" if _is_or_equal(relations[0]) else "("
    closing = "]" if _is_or_equal(relations[1]) else ")"
    return f"{opening}{bounds[0]},{bounds[2]}{closing}"


def _is_variable(text: str, bounds: str) -> bool:
    """Whether it is a variable alone, and bounds are without it."""
    if not _VARIABLE.fullmatch(text) or not bounds.strip():
        return False
    return text not in (_COMMAND.findall(bounds) if "\\" in text else _COMMAND.sub("", bounds))


def _is_less(relation: str) -> bool:
    return relation.startswith(("<", r"\l"))


def _is_or_equal(relation: str) -> bool:
    return relation not in ("<", ">", r"\lt", r"\gt")


def _turned(relation: str) -> str:
    return ("<" if not _is_less(relation) else ">") + ("=" if _is_or_equal(relation) else "")

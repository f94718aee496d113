"""Finds the answer in a response, with only the standard library."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARACTERS = 2_000
"""The maximum length of an answer, and of the end of a response that is searched without a box."""
MAX_NESTING = 200
"""The maximum depth of braces and brackets of an answer."""

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

_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_COMMANDS = {
    "×": "times",
    "·": "cdot",
    "⋅": "cdot",
    "∞": "infty",
    "≤": "le",
    "≥": "ge",
    "≠": "ne",
    "∪": "cup",
    "∩": "cap",
    "∈": "in",
    "∅": "emptyset",
    "∫": "int",
    "∑": "sum",
    "∏": "prod",
    "±": "pm",
}
_SIGNS = str.maketrans("−–﹣⁄∕÷\u00a0", "---/// ", "\u200b\ufeff") | {
    ord("°"): r"^\circ ",
    **{ord(sign): rf"\{command} " for sign, command in _COMMANDS.items()},
}
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")


def read_answer(response: str) -> Candidate | None:
    """Return the answer of a response; None if there is none.

    Only the text after the last end of thinking counts. In it, the last closed `\\boxed{}` is the
    answer. Without a box, the answer is searched for in the end of the text, which begins at the
    last mention of "the answer" if that is earlier.
    """
    text = response[last_end(END_OF_THINKING, response) :]
    boxed = last_box(text)
    if boxed is not None:
        boxed = in_known_characters(boxed).strip()
        return Candidate(text=boxed) if boxed else None
    passage = _passage(text)
    if not passage.isascii():
        # East Asian writing needs no blanks, but a number that touches a letter is none to the
        # parser.
        passage = _BESIDE_EAST_ASIAN.sub(" ", passage).translate(_EAST_ASIAN_STOPS)
    passage = in_known_characters(passage).strip()
    return Candidate(text=passage, boxed=False) if passage else None


def last_end(pattern: re.Pattern[str], text: str) -> int:
    """Return where the last match ends; 0 if there is none."""
    end = 0
    for match in pattern.finditer(text):
        end = match.end()
    return end


def last_box(text: str) -> str | None:
    """Return the content of the last closed box."""
    boxes = list(_BOX.finditer(text))
    closing = _closing_braces(text, boxes[0].start()) if boxes else {}
    for box in reversed(boxes):
        if box[1] != "{":
            return box[1]
        if box.start(1) in closing:
            return text[box.end() : closing[box.start(1)]]
    return None


def _closing_braces(text: str, start: int) -> dict[int, int]:
    """Return where each unescaped brace that opens from `start` on closes."""
    # It takes one pass for all of them, as a response may hold a box on every line.
    opened: list[int] = []
    closing: dict[int, int] = {}
    for mark in _BRACE.finditer(text, start):
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened:
            closing[opened.pop()] = mark.start()
    return closing


def _passage(text: str) -> str:
    text = text.rstrip()
    # The parser knows no Chinese or Japanese phrase for "the answer is".
    for sentence in () if text.isascii() else reversed(_END_OF_SENTENCE.split(text)):
        end = last_end(_EAST_ASIAN_ANSWER, sentence)
        if end and _SAYS_SOMETHING.search(sentence, end):
            return f"答案: {sentence[end:]}"[:MAX_CHARACTERS]
    if len(text) <= MAX_CHARACTERS:
        return text
    start = len(text) - MAX_CHARACTERS
    phrases = [match.start() for match in _ANSWER_PHRASE.finditer(text)]
    if phrases and phrases[-1] < start:
        line = text[phrases[-1] :].split("\n", 1)[0]
        return line[:MAX_CHARACTERS]
    # From a new line on: after half a formula, all dollar signs would be read the wrong way round.
    newline = text.find("\n", start)
    return text[newline + 1 :] if newline >= 0 else text[start:]


def in_known_characters(text: str) -> str:
    """Return a text with look-alikes, full-width forms and symbols as plain characters."""
    if text.isascii():
        return text
    # NFKC alone would turn 10² into 102 and 1½ into 11/2, so those are spelled out first.
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR_FRACTION.sub(_as_command, text)
    text = text.translate(_SIGNS)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    return _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)


def _as_command(fraction: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", fraction[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def too_much_to_read(text: str) -> bool:
    """Report whether an answer is longer or deeper than any honest one."""
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
    """Report whether an answer still has an integral, a sum, a product or arithmetic to evaluate.

    A fraction, a mixed number, a power and a number such as 3*10^5 count as values.
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
    # A number that is written with operators counts as a value, so a 1 takes its place.
    text = _SCIENTIFIC.sub("1", text)
    for _ in range(_DEEPEST_FRACTION):
        text, count = _FRACTION.subn("1", text)
        if not count:
            break
    return text.replace(r"\frac", "")  # of a fraction with something left to evaluate


_RELATION = re.compile(
    r"(\\(?:leqslant|geqslant|leqq|geqq|leq|geq|le|ge|lt|gt)(?![a-zA-Z])|<=|>=|<|>)"
)
_OR = re.compile(r"\\(?:text|mathrm)\s*\{\s*or\s*\}|(?<!\\)\bor\b|\\(?:lor|vee|cup)(?![a-zA-Z])|或")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def solved_as_interval(text: str) -> str | None:
    """Return the interval that a solved inequality describes: `x<3` is `(-\\infty,3)`.

    None for anything else, including an unsolved inequality (`2x+1<7`), which may be the question
    itself.
    """
    intervals = [_interval(part.strip().strip("$").strip()) for part in _OR.split(text)]
    return None if None in intervals else r"\cup ".join(str(one) for one in intervals)


def _interval(text: str) -> str | None:
    text = _THOUSANDS.sub("", text)
    if "," in text.replace(r"\,", "") or "=" in re.sub("[<>]=", "", text):
        return None  # not only an inequality
    sides = [side.strip() for side in _RELATION.split(text)]
    bounds, relations = sides[::2], sides[1::2]
    if len(relations) == 1 and not _is_variable(bounds[0], bounds[1]):
        # 3 > x is x < 3.
        bounds.reverse()
        sign = ">" if _is_less(relations[0]) else "<"
        relations = [sign + ("=" if _is_or_equal(relations[0]) else "")]
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
    if not _VARIABLE.fullmatch(text) or not bounds.strip():
        return False
    return text not in (_COMMAND.findall(bounds) if "\\" in text else _COMMAND.sub("", bounds))


def _is_less(relation: str) -> bool:
    return relation.startswith(("<", r"\l"))


def _is_or_equal(relation: str) -> bool:
    return relation not in ("<", ">", r"\lt", r"\gt")


# Comparing answers without a parser, exactly and in microseconds.

LARGEST_EXPONENT = 99_999
"""The largest exponent or factorial that is evaluated, because larger ones give absurd numbers."""

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
_STATED_LAST = re.compile(
    r"(?:answer\s+is\s*:?|answer\s*:|####)\s*\$?\s*([+-]?[\d.,/]*\d)\s*\$?\s*\.?\Z", re.IGNORECASE
)


def same_or_not(gold: str, candidate: Candidate) -> bool | None:
    """Report whether an answer equals the known one; None if that requires a parser.

    Equal texts are equal. Two exact numbers are compared as numbers. An inexact decimal requires
    the parser, which rounds.
    """
    text = candidate.text
    if not candidate.boxed:
        stated = _STATED_LAST.search(text)
        if stated is None:
            return None
        text = stated[1]
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
    """Return the base of a number that is marked with it, as in `110_2`; otherwise None."""
    written = _IN_BASE.fullmatch(bare(text).replace(" ", ""))
    return None if written is None else int(written[1] or written[2])


def bare(text: str) -> str:
    """Return a text without what only changes its appearance."""
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
    """Return the value of a plain integer, decimal, fraction or mixed number; otherwise None."""
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


_POWER = re.compile(r"\*\*|\^")
_GROUP = {"{": "}", "(": ")"}
_PLAIN_POWER = re.compile(r"(\d+)(?:\*\*|\^)(.+)", re.DOTALL)
_LONGEST_EXPONENT = 200
_LONG_FACTORIAL = re.compile(r"(?:\d{6,}|[)}])\s*!")


def is_absurd(text: str) -> bool:
    """Report whether evaluating a number would need too much memory.

    This holds for a large tower of powers, an exponent or a factorial of more than five digits, and
    a factorial of a power. Powers of letters and small towers (2^{2^3}) are allowed.
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
    """Return the exponent that begins at `start`: a group, or a number with its own powers."""
    closing = _GROUP.get(text[start : start + 1])
    if closing is None:
        # `^12` is `^{1}2` to LaTeX; read here as a person means it, which can only be larger.
        match = re.match(r"-?\d+(?:(?:\*\*|\^).+)?", text[start:], re.DOTALL)
        return match[0] if match else ""
    opening, depth = text[start], 0
    for position in range(start, len(text)):
        depth += {opening: 1, closing: -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return text[start + 1 :]


def _size(exponent: str) -> float:
    """Return the approximate value of a numeric exponent; infinite if it is too large."""
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


# The letter of a multiple-choice answer. The last "Answer: X" of a response counts.

# The word for "Answer" in multilingual prompts.
ANSWER_WORDS: dict[str, tuple[str, ...]] = {
    "English": ("Answer",),
    "Arabic": ("الإجابة", "الاجابة", "الجواب", "إجابة", "جواب"),
    "Bengali": ("উত্তর", "উত্তরঃ"),
    "Chinese": ("答案是", "答案为", "答案為", "答案", "答复", "答覆"),
    "Dutch": ("Antwoord",),
    "French": ("Réponse",),
    "German": ("Antwort",),
    "Hindi": ("उत्तर", "जवाब"),
    "Indonesian": ("Jawaban",),
    "Italian": ("Risposta",),
    "Japanese": ("答え", "回答", "解答"),
    "Korean": ("정답", "답변", "답"),
    "Polish": ("Odpowiedź",),
    "Portuguese": ("Resposta",),
    "Russian": ("Ответ",),
    "Spanish": ("Respuesta",),
    "Swahili": ("Jibu", "Jawabu"),
    "Thai": ("คำตอบ",),
    "Turkish": ("Cevap", "Yanıt"),
    "Vietnamese": ("Đáp án", "Câu trả lời", "Trả lời"),
    "Yoruba": ("Ìdáhùn", "Idahun"),
}

# Letters of other scripts that stand for A to D, and Cyrillic ones that look like them.
_LETTERS = str.maketrans("أابجد" + "অবসডদ" + "АВС", "AABCD" + "ABCDD" + "ABC")

# Marks around a letter: bold, brackets, dollar signs, a box.
_DRESSING = r"[\s*_`$(\[{\"'：]*(?:\\(?:boxed|text|textbf|mathbf|mathrm)\s*\{\s*)*[(\[]?"
# A small letter counts only at the end of a line: "Answer: a fair coin" names no option.
_LATIN = r"([A-Z](?!\w)|[a-z](?=[\s*_`$)\]}.\"']*(?:\n|\Z)))"
_ENGLISH = re.compile(rf"(?i:\banswer)[*_]*\s*:{_DRESSING}{_LATIN}")


def _pattern_of_all() -> re.Pattern[str]:
    spelled = sorted(
        {_normal(word) for words in ANSWER_WORDS.values() for word in words}, key=len, reverse=True
    )
    words = "|".join(re.escape(word) for word in spelled)
    other = "".join(sorted({_normal(chr(letter)) for letter in _LETTERS}))
    return re.compile(rf"(?i:{words})[*_]*\s*:{_DRESSING}(?:{_LATIN}|([{other}])(?!\w))")


def _normal(text: str) -> str:
    # Full-width forms and colons, and those of other scripts, become plain.
    return unicodedata.normalize("NFKC", text).replace("ঃ", ":").replace("؛", ":")


_ANY_LANGUAGE = _pattern_of_all()


def check_choice(response: str, gold: str, *, multilingual: bool) -> Checked:
    """Check whether the last letter that a response names as its answer is the right one.

    With `multilingual`, the word for "Answer" and the letters of every supported language count.
    """
    right = _normal(gold).strip().strip("().").translate(_LETTERS).upper()
    if re.fullmatch("[A-Z]", right) is None:
        return Checked(verdict="error", reason=f"the known answer {gold!r} is not a letter")
    text = response[last_end(END_OF_THINKING, response) :]
    letter = None
    for match in (_ANY_LANGUAGE if multilingual else _ENGLISH).finditer(_normal(text)):
        letter = match[match.lastindex or 0].translate(_LETTERS).upper()
    if letter is None:
        return Checked(verdict="unparseable")
    return Checked(verdict="correct" if letter == right else "incorrect", answer=letter)


# The values of answer checking.

Verdict = Literal["correct", "incorrect", "unparseable", "timeout", "error"]
"""The outcomes of a check.

`unparseable` means that the response has no readable answer, and `timeout` that the answer could
not be checked within the limits of time and memory. Both are the policy's fault, and have the
reward 0. `error` means that the checker or the known answer is at fault, so there is no reward.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The part of a response that is or contains its answer."""

    text: str
    boxed: bool = True
    """Whether the text is the answer, as in a box, or a passage that contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The verdict on one response."""

    verdict: Verdict
    answer: str | None = None
    """The answer as it was read."""
    reason: str | None = None
    """The reason why there is no verdict; it is set only for `error`."""

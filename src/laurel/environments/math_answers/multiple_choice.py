"""The letter of a multiple-choice answer. The last "Answer: X" of a response counts."""

from __future__ import annotations

import re
import unicodedata

from laurel.environments.math_answers.reading import END_OF_THINKING, last_end
from laurel.environments.math_answers.verdicts import Checked

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
"""How multilingual prompts ask for the letter."""

_LETTERS = str.maketrans(
    {"أ": "A", "ا": "A", "ب": "B", "ج": "C", "د": "D",
     "অ": "A", "ব": "B", "স": "C", "ড": "D", "দ": "D",
     "А": "A", "В": "B", "С": "C"}
)  # fmt: skip
"""Letters of other scripts that stand for A to D, and Cyrillic ones that look like them."""

_DRESSING = r"[\s*_`$(\[{\"'：]*(?:\\(?:boxed|text|textbf|mathbf|mathrm)\s*\{\s*)*[(\[]?"
"""Marks around a letter: bold, brackets, dollar signs, a box."""
# A small letter counts only where the line ends with it: "Answer: a fair coin" names no option.
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
    """One spelling of each letter: full-width forms and full-width colons are plain."""
    return unicodedata.normalize("NFKC", text).replace("ঃ", ":").replace("؛", ":")


_ANY_LANGUAGE = _pattern_of_all()


def check_choice(response: str, gold: str, *, multilingual: bool) -> Checked:
    """Whether the last letter that a response names as its answer is the right one.

    Args:
        response: What the policy said.
        gold: The right letter.
        multilingual: Take the word for "Answer", and the letter, in any of the languages above.
    """
    right = _normal(gold).strip().strip("().").translate(_LETTERS).upper()
    if re.fullmatch("[A-Z]", right) is None:
        return Checked(verdict="error", reason=f"the known answer {gold!r} is not a letter")
    text = response[last_end(END_OF_THINKING, response) :]
    letter = _last_letter(text, multilingual)
    if letter is None:
        return Checked(verdict="unparseable")
    return Checked(verdict="correct" if letter == right else "incorrect", answer=letter)


def _last_letter(text: str, multilingual: bool) -> str | None:
    pattern = _ANY_LANGUAGE if multilingual else _ENGLISH
    found = None
    for match in pattern.finditer(_normal(text)):
        found = match[match.lastindex or 0]
    return found.translate(_LETTERS).upper() if found else None

"""The last "Answer: X" counts, in any language."""

import pytest

from laurel.extensions.math.answers import ANSWER_WORDS, check_choice


def english(response, gold="B"):
    return check_choice(response, gold, multilingual=False)


def multilingual(response, gold="B"):
    return check_choice(response, gold, multilingual=True)


def test_d17_the_last_answer_counts():
    checked = english("Answer: A\nOn reflection:\nAnswer: B")
    assert (checked.verdict, checked.answer) == ("correct", "B")
    assert english("Answer: B. No.\nAnswer: C").verdict == "incorrect"


@pytest.mark.parametrize(
    "response",
    [
        "Answer: B",
        "answer:B",
        "ANSWER : (B)",
        "**Answer:** B",
        "**Answer: B**",
        "Answer: $B$",
        r"Answer: \boxed{B}",
        r"Answer: $\boxed{\text{B}}$",
        "Answer: b",
        "Answer: b.\n",
        "Answer: [B]",
        "Answer: B) because",
        "Final Answer: B\nGood luck.",
    ],
)
def test_ways_to_write_it(response):
    assert english(response).verdict == "correct"
    assert multilingual(response).verdict == "correct"


@pytest.mark.parametrize(
    "response", ["B", "", "Answer: Because", "Answer: a fair coin", "The answer is B", "Answer:"]
)
def test_no_letter(response):
    assert english(response).verdict == "unparseable"


def test_only_what_comes_after_the_thinking():
    assert english("Answer: B</think>").verdict == "unparseable"
    assert english("Answer: A</think>Answer: B").verdict == "correct"


@pytest.mark.parametrize("word", [word for words in ANSWER_WORDS.values() for word in words])
def test_every_word_for_answer(word):
    assert multilingual(f"…\n{word}: B").verdict == "correct"
    assert multilingual(f"{word}: B\n{word}: C").verdict == "incorrect"


def test_there_are_many_languages():
    assert len(ANSWER_WORDS) >= 14


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("答案：Ｂ", "B"),
        ("答え:Ｄ", "D"),
        ("الإجابة: ب", "B"),
        ("الجواب: ج", "C"),
        ("উত্তরঃ অ", "A"),
        ("উত্তর: খ\nAnswer: C", "C"),
        ("Ответ: В", "B"),
        ("정답: (A)", "A"),
        ("Réponse : C", "C"),
    ],
)
def test_letters_of_other_scripts(response, letter):
    assert multilingual(response, letter).answer == letter


def test_words_of_different_languages_are_in_one_order():
    assert multilingual("Respuesta: A\nAnswer: B").answer == "B"
    assert multilingual("Answer: B\nRespuesta: A").answer == "A"


def test_english_only_knows_english():
    assert english("Respuesta: B").verdict == "unparseable"


@pytest.mark.parametrize("gold", ["", "BC", "42", "Berlin"])
def test_a_known_answer_that_is_no_letter_is_an_error_not_a_zero(gold):
    checked = english("Answer: B", gold)
    assert checked.verdict == "error"
    assert "not a letter" in checked.reason


@pytest.mark.parametrize("gold", ["b", " B ", "(B)", "B."])
def test_ways_to_write_the_known_answer(gold):
    assert english("Answer: B", gold).verdict == "correct"

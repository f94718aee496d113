"""Answers that are easily taken for what they are not, each with its verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from laurel.extensions.math.environment import AnswerChecker

LIMIT = 3.0


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    checker = AnswerChecker(num_workers=1, timeout_seconds=LIMIT)
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"1\frac12", "1.5"),
        ("1 1/2", "3/2"),
        ("½", "1/2"),
        ("√2", r"\sqrt{2}"),
        ("１２", "12"),
        ("−5", "-5"),
        ("π", r"\pi"),
        ("1,000", "1000"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        ("x=5", "5"),
        ("2/4", "1/2"),
        ("1:2", "1/2"),
        ("10^6", "1000000"),
        ("0.333333", "1/3"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("[0,1)", "[0,1)"),
        (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("110_2", "110_{2}"),
        ("(1,2)", "1<x<2"),
        ("x<3", r"(-\infty,3)"),
        (r"-1 \le x \le \sqrt{2}", r"[-1,\sqrt{2}]"),
        (r"x<1 \text{ or } x\geq 3", r"(-\infty,1)\cup[3,\infty)"),
        # Restated where the known answer is so, too; or worked out beside it.
        (r"3\cdot 2^2", r"2^2\cdot 3"),
        (r"2\cdot 9=18", "18"),
        # What the question asks for decides these: the parser leaves units and percent signs out.
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("50", r"50\%"),
        ("5", r"5\text{ cm}"),
        (r"5\text{ cm}", r"5\text{ m}"),
    ],
)
def test_the_same(checker: AnswerChecker, answer: str, gold: str) -> None:
    assert checker.check([rf"\boxed{{{answer}}}"], [gold])[0].verdict == "correct"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(1,2)", "(2,1)"),
        ("(0,1)", "[0,1]"),
        ("3.14159", r"\pi"),
        ("0.333", "1/3"),
        ("41 or 42", "42"),
        (r"\frac{1}{0}", "1"),
        ("True", "1"),
        ("110_3", "110_2"),
        ("141_{14}", "141_{13}"),
        # Only restated:
        (r"\int_0^1 x^2dx", "1/3"),
        (r"\sum_{i=1}^{100} i", "5050"),
        ("(16-3-4)*2", "18"),
        (r"x=\left(16-3-4\right)\cdot 2\text{ dollars}", "18"),
        (r"\frac{3+4}{2}", "3.5"),
        ("x<1+2", r"(-\infty,3)"),
        ("2x+1<7", r"(-\infty,3)"),
        (r"x\le 3", r"(-\infty,3)"),
        ("x<3", "3"),
    ],
)
def test_not_the_same(checker: AnswerChecker, answer: str, gold: str) -> None:
    assert checker.check([rf"\boxed{{{answer}}}"], [gold])[0].verdict == "incorrect"


@pytest.mark.parametrize(
    "response",
    [
        "最终答案为12。",
        "答案：12",
        "所以答案是 $12$ 元。",
        "一共有3个，最终答案为12。共用了2步。",
        "答えは12個です。",
        "정답은 12입니다.",
    ],
)
def test_an_answer_in_words_that_have_no_blanks(checker: AnswerChecker, response: str) -> None:
    right, wrong = checker.check([response, response], ["12", "2"])
    assert (right.verdict, wrong.verdict) == ("correct", "incorrect")


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "10^{10^{10}}",
        "99999999!",
        "1" * 10_000,
        "{" * 5_000 + "1" + "}" * 5_000,
        r"\frac{" * 2_000 + "1" + "}{2}" * 2_000,
        r"\sqrt{" * 500 + "2" + "}" * 500,
        r"\det"
        + r"\begin{pmatrix}"
        + r"\\".join("&".join("abcdefghi") for _ in range(9))
        + r"\end{pmatrix}",
        "(x+y+z)^{60}",
        r"\prod_{i=1}^{10000000} i",
        "x" + "_{1" * 300 + "}" * 300,
        "\\",
        r"\boxed" * 500,
    ],
)
def test_what_is_too_much_earns_nothing_and_ends_in_its_time(
    checker: AnswerChecker, answer: str
) -> None:
    started = time.monotonic()
    verdict = checker.check([rf"\boxed{{{answer}}}"], ["7"])[0].verdict
    took = time.monotonic() - started
    assert verdict in ("incorrect", "unparseable", "timeout")
    assert took < 60, "it was not ended at all"
    after = checker.check([r"\boxed{1+x}"], ["x+1"])[0]
    assert after.verdict == "correct", "whoever comes next is served"

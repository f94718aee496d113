"""Which part of a response is the answer, and what can be told of it without a parser."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.extensions.math.answers import (
    MAX_CHARACTERS,
    Candidate,
    exact_number,
    in_known_characters,
    is_absurd,
    is_unevaluated,
    read_answer,
    same_or_not,
    solved_as_interval,
    too_much_to_read,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{41}, no, \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{ \{ }", r"\{"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed 2", "2"),
        (r"\boxed {3}", "3"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{1}</think>a</think>\boxed{3}", "3"),
        (r"the first \boxed{41}, then \boxed{42", "41"),
        (r"\boxed{４２}", "42"),
    ],
)
def test_the_last_closed_box_after_the_last_thought(response, answer):
    assert read_answer(response) == Candidate(text=answer)


@pytest.mark.parametrize("response", ["", "  \n", r"\boxed{1}</think>", r"\boxed{}", r"\boxed{ }"])
def test_no_answer(response):
    assert read_answer(response) is None


def test_without_a_box_the_passage_is_kept():
    assert read_answer("It is 4.") == Candidate(text="It is 4.", boxed=False)


def test_a_long_text_is_read_from_a_new_line_on():
    text = "$x$ " * 2_000 + "\nso it is $y$"
    candidate = read_answer(text)
    assert candidate == Candidate(text="so it is $y$", boxed=False)


def test_an_early_statement_of_the_answer_goes_before_a_late_passage():
    text = "The answer is 42.\n" + "But note this. " * 500
    assert read_answer(text) == Candidate(text="The answer is 42.", boxed=False)


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("10²", "10^{2}"),
        ("x⁻¹²", "x^{-12}"),
        ("½", r"\frac{1}{2}"),
        ("1½", r"1\frac{1}{2}"),
        ("−5", "-5"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("１，０００", "1,000"),
        ("2×3", r"2\times 3"),
        ("plain", "plain"),
    ],
)
def test_typographic_mathematics(typed, plain):
    assert in_known_characters(typed) == plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("-42", Fraction(-42)),
        ("+7", Fraction(7)),
        ("1,234,567", Fraction(1234567)),
        ("1{,}000", Fraction(1000)),
        ("0.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1,000.25", Fraction(4001, 4)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\tfrac34", Fraction(3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("$5$", Fraction(5)),
        (r"\(5\)", Fraction(5)),
        (r"\$5", Fraction(5)),
        ("5.", Fraction(5)),
        ("1/0", None),
        ("1,23", None),
        ("5 m", None),
        ("50%", None),
        ("x", None),
        ("", None),
        ("1e5", None),
        ("2^3", None),
        ("9" * 61, None),
    ],
)
def test_plain_numbers(text, value):
    assert exact_number(text) == value


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=999))
def test_a_fraction_is_read_in_each_spelling(value):
    sign, size = ("-" if value < 0 else ""), abs(value)
    n, d = size.numerator, size.denominator
    assert exact_number(f"{sign}{n}/{d}") == value
    assert exact_number(rf"{sign}\frac{{{n}}}{{{d}}}") == value
    assert exact_number(f"{sign}{n // d} {n % d}/{d}") == value


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("42", "42", True),
        ("42", "42.0", True),
        ("42", "43", False),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "2/4", True),
        (r"\frac{1}{3}", "2/3", False),
        (r"\frac{1}{3}", "0.333333", None),  # whether rounding is fine is the parser's business
        (r"\dfrac{x}{2}", r"$\frac{x}{2}$", True),
        ("x+1", "1+x", None),
        (r"\text{(A)}", r"\text{(A)}", True),
    ],
)
def test_same_or_not(gold, text, verdict):
    assert same_or_not(gold, Candidate(text=text)) is verdict


@pytest.mark.parametrize(
    ("passage", "verdict"),
    [
        ("So the answer is 42.", True),
        ("The final answer is: $42$", True),
        ("... #### 42", True),
        ("The answer is 41", False),
        ("The answer is 42 apples", None),
        ("Is it 42", None),
        ("The answer is 42, or 43", None),
    ],
)
def test_a_passage_is_told_only_where_it_ends_with_the_answer(passage, verdict):
    assert same_or_not("42", Candidate(text=passage, boxed=False)) is verdict


@pytest.mark.parametrize(
    "tower",
    [
        "9**9**9**9",
        "9^{9^{9}}",
        "9^9^9",
        "10^{10^{10}}",
        "(10^{10^{10}})!",
        "99999999!",
        "2^{999999}",
        "2^1234567",
        r"3^{20^6}",
        "(10^6)!",
    ],
)
def test_d16_towers_are_seen(tower):
    assert is_absurd(tower)


@pytest.mark.parametrize(
    "honest",
    [
        "2^{10}",
        "2^{2^3}",
        "10!",
        "x^{y^2}",
        "e^{x^2}",
        "2^{99999}",
        "(x+y)^{60}",
        "n!",
        "2^{-3}",
        r"3^{\frac{1}{2}}",
        "x^2+y^2",
        "a^{b^{c^d}}",
        "10^{12}",
        "(n+1)!",
        "",
    ],
)
def test_honest_powers_are_left_alone(honest):
    assert not is_absurd(honest)


@given(st.text(alphabet="0123456789^*{}()!x -", max_size=40))
def test_looking_for_towers_never_fails(text):
    assert is_absurd(text) in (True, False)


@given(st.text(max_size=200))
def test_reading_never_fails(text):
    candidate = read_answer(text)
    assert candidate is None or candidate.text.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\int_0^1 x", True),
        (r"\sum_{i}i", True),
        (r"\prod i", True),
        (r"\iint", True),
        (r"\sumo", False),
        (r"\interval", False),
        ("3", False),
        ("(16-3-4)*2", True),
        (r"(16-3-4)\times 2\text{ kg}", True),
        ("x=3+4", True),
        ("9(2)", True),
        (r"2^3\cdot 3", True),
        (r"\frac{3+4}{2}", True),
        ("10^{3-1}", True),
        ("3!*2", True),
        ("1,000+1", True),
        ("(1+2,3)", True),
        (r"(-\infty,1+2)", True),
        ("2**3*2", True),
        ("-18", False),
        ("1 1/2", False),
        (r"1\frac12", False),
        (r"-\frac{-3}{4}", False),
        (r"\frac{\frac{1}{2}}{3}", False),
        ("2^{-3}", False),
        ("10!", False),
        ("3*10^5", False),
        (r"6.02\cdot 10^{-23}", False),
        ("(-1,-2)", False),
        (r"\{1,-2\}", False),
        ("[-1,5)", False),
        ("2*9=18", False),
        ("18=2*9", False),
        ("x+1", False),
        (r"2\sqrt{3}", False),
        ("1:2", False),
        (r"50\%", False),
        (r"90^\circ", False),
        ("3+4i", False),
        (r"\pi/2+1", False),
        ("", False),
    ],
)
def test_what_is_unevaluated(text, expected):
    assert is_unevaluated(text) is expected


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("x<3", r"(-\infty,3)"),
        (r"3\geq y", r"(-\infty,3]"),
        ("x>=a+1", r"[a+1,\infty)"),
        ("5>x>=2", "[2,5)"),
        (r"\theta<\pi", r"(-\infty,\pi)"),
        ("x<1,000", r"(-\infty,1000)"),
        (r"x<1 \text{ or } x>3", r"(-\infty,1)\cup (3,\infty)"),
        *(
            (text, None)
            for text in (
                "2x+1<7",
                "x^2<9",
                "x<x+1",
                "1<2",
                "x<3, x>1",
                "2<x>5",
                "x=3",
                "x<",
                "(1,2)",
                "",
                r"x<1 \text{ or } 5",
            )
        ),
    ],
)
def test_a_solved_inequality_is_an_interval(text, interval):
    assert solved_as_interval(text) == interval


def test_what_is_too_much():
    assert too_much_to_read("x" * (MAX_CHARACTERS + 1))
    assert too_much_to_read("{" * 201 + "}" * 201)
    assert not too_much_to_read("{}" * 900)
    assert not too_much_to_read("x" * MAX_CHARACTERS)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{{" * 20_000 + "}" * 20_000,
        "{" * 100_000,
        "</think>" * 20_000,
        "answer is " * 20_000,
        "the answer is 1" * 20_000,
        " " * 200_000,
        "\\" * 200_000,
        r"\boxed{" + "9^" * 990 + "9}",
        r"\boxed{" + "9^{" * 600 + "}" * 600 + "}",
        r"\boxed{" + "1" * 1_990 + "}",
        r"\boxed{" + "(1)^" * 490 + "1}",
        "√" * 100_000,
        "答案是" * 60_000,
        "答案是1。" * 60_000,
        "答案" * 60_000 + "\n" * 60_000,
        r"\boxed{" + "1/" * 990 + "}",
        r"\boxed{" + "x<" * 990 + "}",
        r"\boxed{" + " or" * 660 + "}",
        r"\boxed{" + "1*10^" * 390 + "}",
        r"\boxed{" + r"\frac{1" * 280 + "}",
    ],
)
def test_no_response_holds_up_the_reader(text):
    """What runs in the caller has no limit of its own, so it must not need one."""
    begun = time.process_time()
    candidate = read_answer(text)
    if candidate is not None:
        same_or_not("4", candidate)
        if not too_much_to_read(candidate.text):
            is_absurd(candidate.text)
            is_unevaluated(candidate.text)
            solved_as_interval(candidate.text)
    assert time.process_time() - begun < 2.0  # some milliseconds; a quadratic way takes minutes

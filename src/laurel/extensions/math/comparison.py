"""Calls math-verify in processes that can be killed; no other module imports math-verify."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.answers import Candidate, Checked, is_unevaluated, solved_as_interval

SELF_TEST: tuple[tuple[str, str, bool], ...] = (
    ("4", "4", True),
    ("4", "5", False),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\frac{2}{3}", False),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    ("(1,2)", "(2,1)", False),
    ("(x+1)^2", "x^2+2x+1", True),
    (r"(-\infty,3]", r"(-\infty,3)", False),
    ("5", "x=5", True),
    (r"(-\infty,3)", "x<3", True),
    (r"(-\infty,3)", r"x\le 3", False),
    ("18", "(16-3-4)*2", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
    (r"\text{Evelyn}", r"\text{Evelyn}", True),
)
"""Known answers, given answers, and whether they are equal.

A checker that fails one of these is not used, because a checker that always says no would not be
noticed otherwise.
"""


def answers_match(gold: str, candidate: Candidate, *, forbid_unevaluated: bool) -> Checked:
    """Return math-verify's verdict on a candidate; this call may never return."""
    known = _known_answer(gold)
    if not known:
        return Checked(verdict="error", reason=f"the known answer {gold!r} cannot be read")
    text = rf"\boxed{{{candidate.text}}}" if candidate.boxed else candidate.text
    given = _parsed(text, (ExprExtractionConfig(), LatexExtractionConfig()))
    if not given:
        return Checked(verdict="unparseable")
    written = next((one for one in reversed(given) if isinstance(one, str)), candidate.text)
    answer = candidate.text if candidate.boxed else written
    if forbid_unevaluated and is_unevaluated(answer) and not is_unevaluated(gold):
        return Checked(verdict="incorrect", answer=answer)
    same = verify(list(known), given, timeout_seconds=None)
    if not same and (interval := solved_as_interval(answer)) is not None:
        if forbid_unevaluated and is_unevaluated(interval) and not is_unevaluated(gold):
            return Checked(verdict="incorrect", answer=answer)
        solved = _parsed(rf"\boxed{{{interval}}}", (LatexExtractionConfig(),))
        same = verify(list(known), solved, timeout_seconds=None)
    return Checked(verdict="correct" if same else "incorrect", answer=answer)


@functools.lru_cache(maxsize=512)
def _known_answer(gold: str) -> tuple[Any, ...]:
    return tuple(_parsed(rf"\boxed{{{gold}}}", (LatexExtractionConfig(),)))


def _parsed(text: str, extraction: tuple[Any, ...]) -> list[Any]:
    # Its own timeouts are switched off: they are alarms, which cannot interrupt a long computation
    # in C and would replace an alarm that the program itself uses. The calling process keeps the
    # time limit.
    return list(parse(text, extraction, parsing_timeout=0))  # 0: none


def failed_self_test() -> list[str]:
    """Return the pairs of `SELF_TEST` on which math-verify's verdict is wrong."""
    failed = []
    for gold, text, expected in SELF_TEST:
        checked = answers_match(gold, Candidate(text=text), forbid_unevaluated=True)
        if checked.verdict != ("correct" if expected else "incorrect"):
            failed.append(f"{text} for {gold}: {checked.verdict}")
    return failed


def prepare(settings: None) -> Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Prepare this process to check answers, as `ProcessPoolSpec.prepare` requires.

    Raises:
        EnvironmentFailedError: math-verify gives wrong verdicts.
    """
    logging.disable(logging.CRITICAL)
    failed = failed_self_test()
    if failed:
        raise EnvironmentFailedError(
            "math-verify gives wrong verdicts on known answers; is its version one that Laurel "
            f"is tested with? {'; '.join(failed)}"
        )
    with open(os.devnull, "wb") as nowhere:  # a parser writes a line on each bad answer
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    return lambda: _check


def _check(item: dict[str, Any]) -> dict[str, Any]:
    candidate = Candidate(text=item["text"], boxed=item["boxed"])
    forbid = item["forbid_unevaluated"]
    try:
        checked = answers_match(item["gold"], candidate, forbid_unevaluated=forbid)
    except MemoryError:
        checked = Checked(verdict="timeout", answer=item["text"] if item["boxed"] else None)
    except Exception as error:
        checked = Checked(verdict="error", reason=f"{type(error).__name__}: {error}"[:500])
    return asdict(checked)

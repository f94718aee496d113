"""Other forms of answers, and what they do to scores."""

import pytest

from laurel.errors import ProtocolError
from laurel.evaluation.statistics import ScoredPair
from laurel.extensions.evaluation.diagnostics import (
    VARIANTS,
    Sensitivity,
    other_white_space,
    sensitivity,
    truncated,
    with_markdown,
)
from laurel.types import Message, Score

ANSWER = "It is so. I saw it!\n\nAsk him."


def test_white_space_is_other_and_words_are_the_same():
    assert other_white_space(ANSWER) == "It is so.  I saw it!\n\n\nAsk him.\n\n"
    assert other_white_space("def f():\n    return 1") == "def f():\n    return 1\n\n"
    assert other_white_space(" ") is None


def test_markdown_is_added_once():
    assert with_markdown(ANSWER) == "- **It is so.** I saw it!\n\n- **Ask him.**"
    for text in ("", "- a\n- b", "# Title", "**bold**", "```\ncode\n```", "1. one", "    x = 1"):
        assert with_markdown(text) is None, text


def test_the_end_is_cut_off():
    assert truncated("one  two three\nfour five") == "one  two three\nfour"
    assert truncated("one two") == "one"
    assert truncated("one") is None


def pair(name, chosen, rejected):
    return ScoredPair(
        id=name,
        prompt=(Message("user", f"{name}?"),),
        chosen=chosen,
        rejected=rejected,
        score_chosen=None,
        score_rejected=None,
    )


def scoring(values):
    """Scores answers by a table; what is not in it, or None there, fails."""

    def score(groups):
        return [
            tuple(
                Score(value=values[text])
                if values.get(text) is not None
                else Score(value=None, failure="unknown")
                for completion in group.completions_G
                for text in [completion.messages[0].content]
            )
            for group in groups
        ]

    return score


def shout(text):
    return text.upper() if text != "x" else None


def test_figures_by_hand():
    pairs = [pair("1", "a", "b"), pair("2", "c", "d"), pair("3", "e", "x"), pair("4", "f", "g")]
    values = {
        "a": 4.0,
        "b": 0.0,
        "c": 4.0,
        "d": 0.0,
        "e": 4.0,
        "x": 0.0,
        "f": 4.0,
        "g": 0.0,
        "A": 5.0,
        "B": 1.0,
        "C": -1.0,
        "D": 4.0,
        "E": 4.0,
        "F": None,
        "G": 1.0,
    }
    (found,) = sensitivity(pairs, scoring(values), variants={"shout": shout})
    # Originals: four times 4 and four times 0, a deviation of 2. Shifts of A B C D E and G:
    # 1 1 -5 4 0 1, together 2, so 2 / 6 / 2. F failed; x has no such form.
    # Pairs 1 and 2 have all four scores. 1: 5 > 1, 5 > 0, 4 > 1: never another. 2: -1 < 4,
    # -1 < 0, 4 = 4: always, for a tie is not right.
    assert found == Sensitivity(
        name="shout",
        num_answers=6,
        num_without=1,
        num_failures=1,
        mean_shift=pytest.approx(1 / 6),
        raised_share=4 / 6,
        num_pairs=2,
        flip_share=0.5,
        flip_share_chosen=0.5,
        flip_share_rejected=0.5,
    )


def test_sides_flip_apart():
    values = {"a": 2.0, "b": 1.0, "A": 4.0, "B": 3.0}
    (found,) = sensitivity([pair("1", "a", "b")], scoring(values), variants={"shout": shout})
    # Alike on both sides it changes nothing (4 > 3); the rejected one alone overtakes (2 < 3).
    shares = (found.flip_share, found.flip_share_chosen, found.flip_share_rejected)
    assert shares == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_figures_of_nothing_are_absent(value):
    (found,) = sensitivity([pair("1", "a", "b")], scoring({"a": value}), variants={"shout": shout})
    assert (found.num_answers, found.num_failures, found.num_pairs) == (0, 2, 0)
    assert found.mean_shift is found.raised_share is found.flip_share is None


def test_a_scorer_of_length_is_moved_as_the_text_grows():
    def by_length(groups):
        return [
            tuple(Score(value=float(len(c.messages[0].content))) for c in g.completions_G)
            for g in groups
        ]

    pairs = [pair("1", ANSWER, "No. It is not."), pair("2", "Yes, it is so.", "It may well be so.")]
    found = {row.name: row for row in sensitivity(pairs, by_length)}
    assert list(found) == list(VARIANTS)
    assert found["flattery"].raised_share == found["white space"].raised_share == 1.0
    assert found["truncated"].raised_share == 0.0
    # Praise makes whichever has it the longer one: the wrong verdict of pair 2 flips when the
    # chosen one has it, the right one of pair 1 when the rejected one has.
    assert found["flattery"].flip_share == 0.0
    assert found["flattery"].flip_share_chosen == found["flattery"].flip_share_rejected == 0.5


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], r"\[\] scores for groups of \[4\]"),
        ([(Score(value=1.0),)], r"\[1\] scores for groups of \[4\]"),
    ],
)
def test_a_scorer_that_miscounts(returned, message):
    with pytest.raises(ProtocolError, match=message):
        sensitivity([pair("1", "a", "b")], lambda _: returned, variants={"shout": shout})

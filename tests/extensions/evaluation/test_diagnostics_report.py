"""What sets share, real data, and everything in one report."""

import io
import json

import pytest
from rich.console import Console

from laurel.errors import ConfigError, DataError
from laurel.evaluation.statistics import (
    ScoredPair,
)
from laurel.extensions.evaluation.diagnostics import diagnostics_report, find_leaks, find_repeats
from laurel.extensions.evaluation.tables import print_diagnostics
from laurel.types import Message, Score


def pair(name, prompt, chosen="yes", rejected="no", scores=(None, None), **others):
    fields = {
        "id": name,
        "prompt": (Message("user", prompt),),
        "chosen": chosen,
        "rejected": rejected,
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }
    return ScoredPair(**(fields | others))


def similarity(prompt, other):
    leaks = find_leaks([pair("a", prompt)], [pair("b", other, "1", "2")], threshold=1e-9)
    return leaks[0].similarity if leaks else 0.0


def words(start, end):
    return " ".join(f"w{number}" for number in range(start, end))


def test_similarity_by_hand():
    # 10 words hold 3 runs of 8. Words 0-9 and 1-10 share 2 of 4 runs; 0-9 and 8-17 none.
    assert similarity(words(0, 10), words(1, 11)) == 0.5
    assert similarity(words(0, 10), words(8, 18)) == 0.0
    # Shorter ones are one run; punctuation is no word, but a sign is one.
    assert similarity("what is it?", "what is it") == 1.0
    assert similarity("2+3", "2*3") == 0.0
    assert similarity("is it what", "what is it") == 0.0
    assert similarity("", "") == 0.0
    # Without spaces, each of 9 characters is a word: 2 runs, of which 1 is shared by 3.
    assert similarity("日本語の文章です。", "本語の文章です。か") == pytest.approx(1 / 3)


def test_leaks_by_hand():
    trained = [
        pair("t0", "What is IT?", "a", "b"),
        pair("t1", "what  is\nit?", "c", "d"),
        pair("t2", words(0, 20)),
    ]
    evaluated = [
        pair("same pair, turned", "what is it?", "d", "c"),
        pair("same prompt", "What is it?", "x", "y"),
        pair("similar", words(1, 21)),  # 13 runs each, 12 shared: 12 / 14
        pair("less similar", words(5, 25)),  # 8 shared: 8 / 18
        pair("new", "Who is it?"),
    ]
    found = find_leaks(evaluated, trained)
    seen = [(leak.evaluated, leak.trained, leak.is_exact, leak.has_same_answers) for leak in found]
    assert seen == [
        ("same pair, turned", "t1", True, True),
        ("same prompt", "t0", True, False),
        ("similar", "t2", False, False),
    ]
    assert [leak.similarity for leak in found] == [1.0, 1.0, pytest.approx(12 / 14)]
    assert [leak.evaluated for leak in find_leaks(evaluated, trained, threshold=8 / 18)] == [
        *(leak.evaluated for leak in found),
        "less similar",
    ]
    assert find_leaks([], trained) == find_leaks(evaluated, []) == []
    # No prompt is nothing shared, unless the answers are.
    empty = [pair("other", " ", "c", "d"), pair("same", "", "a", "b")]
    assert [leak.evaluated for leak in find_leaks(empty, [pair("t", "", "a", "b")])] == ["same"]
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        find_leaks(evaluated, trained, threshold=0.0)


def test_a_system_prompt_is_no_leak():
    # 60 words before every question. In 20 prompts it is an overlap, in 31 it is a template.
    few = [pair(f"t{n}", f"{words(0, 60)} question{n} at{n} last{n}") for n in range(10)]
    many = [*few, *(pair(f"u{n}", f"{words(0, 60)} more{n} of{n} them{n}") for n in range(20))]
    asked = [pair("e", f"{words(0, 60)} another thing altogether")]
    assert [leak.evaluated for leak in find_leaks(asked, few)] == ["e"]
    assert find_leaks(asked, many) == []
    again = [pair("e", f"{words(0, 60)} Question3 at3 last3 please")]
    assert [leak.trained for leak in find_leaks(again, many, threshold=0.5)] == ["t3"]


def test_repeats_by_hand():
    pairs = [
        pair("1", "Is it?", "yes", "no"),
        pair("2", "is  it?", "yes ", "no"),  # the first once more
        pair("3", "Is it?", "no", "yes"),  # against both
        pair("4", "Is it?", "No", "yes"),  # capitals may be what is preferred
        pair("5", "Is it?", "yes", "yes"),  # against nobody
        pair("6", "Was it?", "no", "yes"),
    ]
    found = find_repeats(pairs)
    assert (found.num_pairs, found.num_prompts, found.num_redundant) == (6, 2, 1)
    assert found.duplicates == (("1", "2"),)
    assert found.contradictions == (("1", "2", "3"),)


def by_length(groups):
    return [
        tuple(Score(value=float(len(c.messages[0].content))) for c in g.completions_G)
        for g in groups
    ]


def evaluated():
    return [
        pair("1", "Is it so?", "Yes, it is.", "No.", (2.0, 1.0), subset="[b]", margin=1.0),
        pair("2", "Was it so?", "No.", "Yes, it was.", (1.0, 2.0), subset="a", margin=2.0),
        pair("3", "Will it be so?", "Maybe.", "Perhaps.", (3.0, 0.5), subset="a"),
        pair("4", "Why?", "So.", "Because.", (None, 1.0), failure="too long"),
    ]


def printed(report):
    stream = io.StringIO()
    print_diagnostics(Console(file=stream, width=100, markup=False, highlight=False), report)
    return stream.getvalue()


def test_a_report_of_everything():
    pairs = evaluated()
    report = diagnostics_report(
        pairs,
        training=[pair("t1", "is it so?", "Yes it is.", "No.")] * 3,
        members={
            "one": [(p.score_chosen, p.score_rejected) for p in pairs],
            "two": [(1.0, 0.0)] * 4,
        },
        score=by_length,
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["num_pairs"], report["num_failures"]) == (4, 1)
    assert report["failures"] == {"too long": 1}
    assert report["accuracy"]["value"] == pytest.approx(2 / 3)
    # The longer one is chosen in the first only; "Maybe." and "Perhaps." are 6 and 8 long.
    assert report["accuracy"]["baselines"]["longer wins"] == pytest.approx(1 / 3)
    # "yes", "it" and "is" win in training; the second has one "yes" and "it" on the wrong side,
    # and of the third it knows the full stop, which is in both.
    assert report["accuracy"]["baselines"]["bag of words"] == pytest.approx((1 + 0 + 0.5) / 3)
    # 1 of 1 and 1 of 2.
    assert report["length_controlled_accuracy"]["value"] == 0.75
    assert [(part["name"], part["accuracy"]["value"]) for part in report["by_subset"]] == [
        ("[b]", 1.0),
        ("a", 0.5),
    ]
    assert [part["name"] for part in report["by_margin"]] == ["1", "2"]
    assert [part["name"] for part in report["by_leak"]] == ["no", "yes"]
    counts = {key: report["leakage"][key] for key in report["leakage"] if key.startswith("num_")}
    assert counts == {"num_same_prompt": 1, "num_similar_prompt": 0, "num_same_pair": 0}
    assert report["training_set"]["num_redundant"] == 2
    assert report["agreement"][0]["same_verdict_share"] == pytest.approx(2 / 3)
    assert [row["name"] for row in report["sensitivity"]][-1] == "truncated"
    text = printed(report)
    for part in (
        "4 pairs, 1 of them without a verdict",
        "1 x too long",
        "66.7%",
        "longer wins",
        "bag of words",
        "either as often",
        "[b]",
        "best temperature",
        "flattery",
        "one and two",
        "evaluated prompts in training",
        "Spearman",
    ):
        assert part in text, part


def test_accuracy_on_prompts_that_leaked():
    pairs = [
        pair("same", words(0, 20), "a", "b", (2.0, 1.0)),
        pair("similar", words(1, 21), scores=(1.0, 2.0)),
        pair("similar too", words(0, 19), scores=(2.0, 1.0)),
        pair("new", words(30, 50), scores=(1.0, 2.0)),
    ]
    report = diagnostics_report(pairs, training=[pair("t", words(0, 20), "b", "a")])
    leakage = report["leakage"]
    assert [leakage[f"num_{kind}"] for kind in ("same_prompt", "similar_prompt", "same_pair")] == [
        1,
        2,
        1,
    ]
    assert [leak["evaluated"] for leak in leakage["examples"]] == ["same", "similar", "similar too"]
    assert [(part["name"], part["accuracy"]["value"]) for part in report["by_leak"]] == [
        ("almost", 0.5),
        ("no", 0.0),
        ("yes", 1.0),
    ]


def test_what_there_is_nothing_of_is_absent():
    least = {"num_pairs", "num_failures", "confidence", "evaluation_set"}
    report = diagnostics_report([pair("1", "Is it?", scores=(None, None), failure="gone")])
    assert set(report) == {*least, "failures"}
    assert "%" not in printed(report)
    alone = diagnostics_report([pair("1", "Is it?", scores=(2.0, 1.0))])
    absent = "length_controlled_accuracy by_margin by_subset by_leak agreement sensitivity leakage"
    assert not {*absent.split(), "training_set"} & set(alone)
    assert "temperature" not in alone["calibration"]
    assert "none: no pair is wrong" in printed(alone)
    assert set(diagnostics_report([])) == least
    assert "0 pairs" in printed(diagnostics_report([]))


def test_what_a_report_cannot_be_made_of():
    with pytest.raises(DataError, match="'1' is the id of 2 pairs"):
        diagnostics_report([pair("1", "a"), pair("1", "b"), pair("2", "c")])
    with pytest.raises(DataError, match="member 'one' has scores of 2 pairs, but there are 4"):
        diagnostics_report(evaluated(), members={"one": [(1.0, 2.0)] * 2})

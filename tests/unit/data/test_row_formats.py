import math

import pytest

from laurel.config.data import DatasetConfig
from laurel.data.preferences import (
    infer_class,
)
from laurel.data.preferences import (
    ranked_row as read_ranked_row,
)
from laurel.data.sources import UnusableRow
from laurel.types import Message


def U(text):
    return {"role": "user", "content": text}


def A(text):
    return {"role": "assistant", "content": text}


S = {"role": "system", "content": "be kind"}


def read(row, name, attributes=(), **config):
    return read_ranked_row(row, name, DatasetConfig(**config), attributes)


def said(row_read):
    """Contents of the prompt and of each completion."""
    return (
        [message.content for message in row_read.prompt],
        [[message.content for message in c.messages] for c in row_read.completions_G],
    )


def problem_of(row, name, attributes=(), **config):
    with pytest.raises(UnusableRow) as caught:
        read(row, name, attributes, **config)
    return caught.value


def helpsteer_row(preference, context="q"):
    return {
        "context": context,
        "response1": "one",
        "response2": "two",
        "overall_preference": preference,
        "domain": "general",
    }


@pytest.mark.parametrize(
    ("preference", "answers", "ranks", "margin"),
    [
        (-3, [["one"], ["two"]], (0, 1), 3.0),
        (-1, [["one"], ["two"]], (0, 1), 1.0),
        (0, [["one"], ["two"]], (0, 0), 0.0),
        (2, [["two"], ["one"]], (0, 1), 2.0),
    ],
)
def test_helpsteer3(preference, answers, ranks, margin):
    row_read = read(helpsteer_row(preference), "HelpSteer3")
    assert said(row_read) == (["q"], answers)
    assert row_read.ranks_G == ranks
    assert row_read.margin == margin
    assert row_read.prompt == (Message("user", "q"),)


def test_helpsteer3_needs_a_number():
    assert problem_of(helpsteer_row("better"), "HelpSteer3").kind.endswith("is not a number")
    assert problem_of(helpsteer_row(True), "HelpSteer3").kind.endswith("is not a number")


def test_tulu3_shares_all_but_the_last_message_and_ignores_the_prompt_column():
    row = {"prompt": "x", "chosen": [U("q"), A("a")], "rejected": [U("q"), A("b")]}
    assert said(read(row, "Tulu3Preference")) == (["q"], [["a"], ["b"]])


def test_tulu3_refuses_a_context_mismatch_and_a_last_user_turn():
    row = {"chosen": [U("q"), A("a")], "rejected": [U("r"), A("b")]}
    assert problem_of(row, "Tulu3Preference").kind == "context mismatch"
    row = {"chosen": [U("q")], "rejected": [U("q"), A("b")]}
    assert problem_of(row, "Tulu3Preference").kind == (
        "'chosen' does not end with an assistant turn"
    )


def ranked_row(*ranks, context="q", **more):
    return {
        "context": context,
        "completions": [
            {"rank": rank, "completion": [A(f"answer {place}")]} for place, rank in enumerate(ranks)
        ],
        **more,
    }


def test_ranked_rows_keep_the_order_and_the_ranks():
    row_read = read(ranked_row(2, 0, 2, 5), "PreferenceDataset")
    assert row_read.ranks_G == (2, 0, 2, 5)
    assert said(row_read) == (["q"], [["answer 0"], ["answer 1"], ["answer 2"], ["answer 3"]])
    assert (row_read.margin, row_read.target, row_read.attributes_GK) == (0.0, 1.0, None)


def test_ranked_rows_carry_a_margin_and_a_soft_label():
    row_read = read(ranked_row(0, 1, margin=1.5, target=0.75), "PreferenceDataset")
    assert (row_read.margin, row_read.target) == (1.5, 0.75)
    other = read(
        ranked_row(0, 1, gap=2, sure=0.5), "PreferenceDataset", margin_key="gap", target_key="sure"
    )
    assert (other.margin, other.target) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (ranked_row(0), "too few completions"),
        (ranked_row(), "too few completions"),
        (ranked_row(0, None), "a completion without 'rank'"),
        (ranked_row(0, 0.5), "'rank' is not a whole number"),
        (ranked_row(0, "first"), "'rank' is not a number"),
        (ranked_row(0, 1, target=1.5), "target is no probability"),
        (ranked_row(0, 1, margin="wide"), "'margin' is not a number"),
        (ranked_row(0, 1, context=7), "'context' is not text or messages"),
        (ranked_row(0, 1, context=["hi"]), "'context' holds something that is no message"),
        (ranked_row(0, 1, context=None), "'context' is null"),
        (ranked_row(0, 1, context="\ud800"), "'context' holds half a character"),
        ({"context": "q", "completions": "two"}, "'completions' is not a list"),
        ({"context": "q", "completions": [1, 2]}, "a completion is not an object"),
        ({"context": "q", "completions": [{"rank": 0}] * 2}, "a completion without 'completion'"),
        (
            {"context": "q", "completions": [{"rank": 0, "completion": [U("a")]}] * 2},
            "completion 1 does not end with an assistant turn",
        ),
        ({"context": "q"}, "missing key 'completions'"),
    ],
)
def test_what_a_ranked_row_may_not_be(row, kind):
    assert problem_of(row, "PreferenceDataset").kind == kind


def test_ratings_are_ordered_as_wanted_and_missing_ones_are_nan():
    row = ranked_row(0, 1)
    row["completions"][0]["attributes"] = {"helpful": 4, "correct": 3.5, "other": 1}
    row["completions"][1]["attributes"] = {"helpful": None}
    first, second = read(row, "PreferenceDataset", ("correct", "helpful")).attributes_GK or ()
    assert first == (3.5, 4.0)
    assert all(map(math.isnan, second))


def test_where_ratings_are_wanted_one_completion_without_a_rank_is_enough():
    row = {"context": "q", "completions": [{"completion": "a", "attributes": {"helpful": 4}}]}
    row_read = read(row, "PreferenceDataset", ("helpful",))
    assert row_read.ranks_G == (0,)
    assert row_read.attributes_GK == ((4.0,),)
    assert problem_of(row, "PreferenceDataset").kind == "too few completions"
    row["completions"][0]["attributes"] = {"helpful": "much"}  # type: ignore[index]
    assert problem_of(row, "PreferenceDataset", ("helpful",)).kind == (
        "attribute 'helpful' is not a number"
    )


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ["q"], [["a"], ["b"]]),
        (
            {"prompt": [S, U("q")], "chosen": [A("a")], "rejected": [A("b")]},
            ["be kind", "q"],
            [["a"], ["b"]],
        ),
        (
            {"prompt": "q", "chosen": [U("q"), A("a")], "rejected": [U("q"), A("b")]},
            ["q"],
            [["a"], ["b"]],
        ),
        (  # the conversations say more than the prompt: a system message before, a turn after it
            {
                "prompt": "q",
                "chosen": [S, U("q"), A("1"), U("r"), A("a")],
                "rejected": [S, U("q"), A("1"), U("r"), A("b")],
            },
            ["be kind", "q", "1", "r"],
            [["a"], ["b"]],
        ),
        (  # no prompt: it is what they share
            {
                "chosen": [U("q"), A("1"), U("r"), A("a")],
                "rejected": [U("q"), A("1"), U("r"), A("b")],
            },
            ["q", "1", "r"],
            [["a"], ["b"]],
        ),
        (  # one goes on where the other ends
            {"chosen": [U("q"), A("a")], "rejected": [U("q"), A("a"), U("r"), A("b")]},
            ["q"],
            [["a"], ["a", "r", "b"]],
        ),
        (
            {"prompt": None, "chosen": [U("q"), A("a")], "rejected": [U("q"), A("b")]},
            ["q"],
            [["a"], ["b"]],
        ),
        (
            {
                "chosen": "\n\nHuman: q\n\nAssistant: a",
                "rejected": "\n\nHuman: q\n\nAssistant: b",
            },
            ["q"],
            [["a"], ["b"]],
        ),
        (  # turns lose the blanks around them; a speaker counts only after a blank line
            {
                "chosen": "\n\nHuman: she  said\nAssistant: no \n\nAssistant: one\n\ntwo\n\n",
                "rejected": "\n\nHuman: she  said\nAssistant: no \n\nAssistant: b",
            },
            ["she  said\nAssistant: no"],
            [["one\n\ntwo"], ["b"]],
        ),
        (  # equal transcripts still have an answer each
            {
                "chosen": "\n\nHuman: q\n\nAssistant: 1\n\nHuman: r\n\nAssistant: a",
                "rejected": "\n\nHuman: q\n\nAssistant: 1\n\nHuman: r\n\nAssistant: a",
            },
            ["q", "1", "r"],
            [["a"], ["a"]],
        ),
        (  # content in parts
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
                "chosen": "a",
                "rejected": "b",
            },
            ["q"],
            [["a"], ["b"]],
        ),
    ],
)
def test_binary_rows(row, prompt, answers):
    row_read = read(row, "BinaryPreferenceDataset")
    assert said(row_read) == (prompt, answers)
    assert row_read.ranks_G == (0, 1)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "q", "chosen": 7, "rejected": "b"}, "'chosen' is not text or messages"),
        (
            {"prompt": "q", "chosen": [U("x"), A("a")], "rejected": [U("x"), A("b")]},
            "conversations do not hold the prompt",
        ),
        (
            {"chosen": [U("q"), A("a")], "rejected": [U("r"), A("b")]},
            "conversations part before the answer",
        ),
        ({"chosen": "a", "rejected": "b"}, "missing key 'prompt'"),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c",
                "rejected": "\n\nHuman: a\n\nAssistant: d",
            },
            "transcripts part too early (2 and 1 turns left)",
        ),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b",
                "rejected": "\n\nHuman: x\n\nAssistant: b",
            },
            "transcripts part too early (2 and 2 turns left)",
        ),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c",
                "rejected": "\n\nHuman: a\n\nAssistant: b\n\nAssistant: d",
            },
            "turns do not alternate",
        ),
        (
            {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"},
            "transcript ends with Human",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image"}]}],
                "chosen": "a",
                "rejected": "b",
            },
            "'prompt' holds something other than text",
        ),
    ],
)
def test_what_a_binary_row_may_not_be(row, kind):
    assert problem_of(row, "BinaryPreferenceDataset").kind == kind


def test_a_missing_key_names_the_keys_there_are_and_the_setting_that_mends_it():
    problem = problem_of(
        {"prompt": "q", "chosen_text": "a", "rejected": "b"}, "BinaryPreferenceDataset"
    )
    assert "has no 'chosen'; its keys are: prompt, chosen_text, rejected" in str(problem)
    assert "Set data.chosen_key to the key that holds it ('chosen_text'?)" in str(problem)
    assert "data.on_bad_row=skip" in str(problem)


def test_a_row_of_another_class_names_that_class():
    problem = problem_of({"prompt": "q", "chosen": "a", "rejected": "b"}, "PreferenceDataset")
    assert "set data.dataset_name=BinaryPreferenceDataset" in str(problem)
    problem = problem_of(ranked_row(0, 1), "BinaryPreferenceDataset")
    assert "set data.dataset_name=PreferenceDataset" in str(problem)


def test_margins_come_from_a_column_or_the_difference_of_two():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "s-a": 7.0, "s-b": 4.5, "sure": "0.9"}
    name = "BinaryPreferenceDataset"
    assert read(row, name, margin_key="s-a").margin == 7.0
    assert read(row, name, margin_key="s-a-s-b").margin == 2.5
    assert read(row, name, margin_key="s-b - s-a").margin == -2.5
    assert read(row, name, target_key="sure").target == 0.9
    assert "Set data.margin_key" in str(problem_of(row, name, margin_key="gap"))
    assert "Set data.target_key" in str(problem_of(row, name, target_key="gap"))


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (helpsteer_row(1), "HelpSteer3"),
        (ranked_row(0, 1), "PreferenceDataset"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "BinaryPreferenceDataset"),
        ({"chosen": [U("q"), A("a")], "rejected": [U("q"), A("b")]}, "BinaryPreferenceDataset"),
        ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, "BinaryPreferenceDataset"),
        ({"chosen": "a", "rejected": "b"}, None),
        ({"question": "q", "answer": "a"}, None),
    ],
)
def test_the_class_is_told_by_the_columns(row, name):
    found = infer_class(row, DatasetConfig())
    assert (found and found[0]) == name

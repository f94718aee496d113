import math

import pytest

from chat_rows import assistant, system, transcript, user
from laurel.config.data import DatasetConfig
from laurel.data.preferences import infer_class, parse_transcript
from laurel.data.preferences import ranked_row as read_ranked_row
from laurel.data.sources import UnusableRow
from laurel.types import Message

S = system("be kind")


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
    row = {
        "prompt": "x",
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
    }
    assert said(read(row, "Tulu3Preference")) == (["q"], [["a"], ["b"]])


def test_tulu3_refuses_a_context_mismatch_and_a_last_user_turn():
    row = {"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]}
    assert problem_of(row, "Tulu3Preference").kind == "context mismatch"
    row = {"chosen": [user("q")], "rejected": [user("q"), assistant("b")]}
    assert problem_of(row, "Tulu3Preference").kind == (
        "'chosen' does not end with an assistant turn"
    )


def ranked_row(*ranks, context="q", **more):
    return {
        "context": context,
        "completions": [
            {"rank": rank, "completion": [assistant(f"answer {place}")]}
            for place, rank in enumerate(ranks)
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
        (ranked_row(0, None), "a completion without 'rank'"),
        (ranked_row(0, 0.5), "'rank' is not a whole number"),
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
            {"context": "q", "completions": [{"rank": 0, "completion": [user("a")]}] * 2},
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


def binary(chosen, rejected, **others):
    return {"chosen": chosen, "rejected": rejected, **others}


PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
BEFORE = [user("q"), assistant("1"), user("r")]
SAID = "she  said\nAssistant: no"


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        (
            binary([assistant("a")], [assistant("b")], prompt=[S, user("q")]),
            ["be kind", "q"],
            [["a"], ["b"]],
        ),
        (
            binary([user("q"), assistant("a")], [user("q"), assistant("b")], prompt="q"),
            ["q"],
            [["a"], ["b"]],
        ),
        (  # the conversations say more than the prompt: a system message before, a turn after it
            binary([S, *BEFORE, assistant("a")], [S, *BEFORE, assistant("b")], prompt="q"),
            ["be kind", "q", "1", "r"],
            [["a"], ["b"]],
        ),
        (  # no prompt: it is what they share
            binary([*BEFORE, assistant("a")], [*BEFORE, assistant("b")], prompt=None),
            ["q", "1", "r"],
            [["a"], ["b"]],
        ),
        (  # one goes on where the other ends
            binary(
                [user("q"), assistant("a")], [user("q"), assistant("a"), user("r"), assistant("b")]
            ),
            ["q"],
            [["a"], ["a", "r", "b"]],
        ),
        (binary(transcript("q", "a"), transcript("q", "b")), ["q"], [["a"], ["b"]]),
        (  # turns lose the blanks around them; a speaker counts only after a blank line
            binary(transcript(SAID + " ", "one\n\ntwo\n\n"), transcript(SAID, "b")),
            [SAID],
            [["one\n\ntwo"], ["b"]],
        ),
        (
            binary(transcript("q", "1", "r", "a"), transcript("q", "1", "r", "a")),
            ["q", "1", "r"],
            [["a"], ["a"]],
        ),
        (binary("a", "b", prompt=PARTS), ["q"], [["a"], ["b"]]),
    ],
)
def test_binary_rows(row, prompt, answers):
    row_read = read(row, "BinaryPreferenceDataset")
    assert said(row_read) == (prompt, answers)
    assert row_read.ranks_G == (0, 1)


IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
TWICE = "\n\nAssistant: "


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (binary(7, "b", prompt="q"), "'chosen' is not text or messages"),
        (
            binary([user("x"), assistant("a")], [user("x"), assistant("b")], prompt="q"),
            "conversations do not hold the prompt",
        ),
        (
            binary([user("q"), assistant("a")], [user("r"), assistant("b")]),
            "conversations part before the answer",
        ),
        (binary("a", "b"), "missing key 'prompt'"),
        (
            binary(transcript("a", "b") + f"{TWICE}c", transcript("a", "d")),
            "transcripts part too early (2 and 1 turns left)",
        ),
        (
            binary(transcript("a", "b") + f"{TWICE}c", transcript("a", "b") + f"{TWICE}d"),
            "turns do not alternate",
        ),
        (binary(transcript("a"), transcript("b")), "transcript ends with Human"),
        (
            binary(transcript("a", "b"), transcript("x", "b")),
            "transcripts part too early (2 and 2 turns left)",
        ),
        (binary("a", "b", prompt=IMAGE), "'prompt' holds something other than text"),
    ],
)
def test_what_a_binary_row_may_not_be(row, kind):
    assert problem_of(row, "BinaryPreferenceDataset").kind == kind


def test_only_text_that_starts_with_human_is_a_transcript():
    with pytest.raises(UnusableRow, match="starts with"):
        parse_transcript("Human: hi\n\nAssistant: ho")


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
        (
            {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            "BinaryPreferenceDataset",
        ),
        (binary(transcript("a"), transcript("b")), "BinaryPreferenceDataset"),
        ({"chosen": "a", "rejected": "b"}, None),
        ({"question": "q", "answer": "a"}, None),
    ],
)
def test_the_class_is_told_by_the_columns(row, name):
    found = infer_class(row, DatasetConfig())
    assert (found and found[0]) == name

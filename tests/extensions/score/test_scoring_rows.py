import io
import itertools
import json

import pytest

from chat_rows import assistant, system, transcript, user
from laurel.errors import DataError
from laurel.extensions.score.rows import read_scoring_rows, with_steps_joined
from laurel.types import Completion, Message

ASKED = (Message("user", "Why?"),)


def rows_of(*lines):
    stream = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    return list(read_scoring_rows("-", stdin=stream))


def group_of_row(row):
    (read,) = rows_of(row)
    return read.group


def said(*texts):
    return tuple(Completion(messages=(Message("assistant", text),)) for text in texts)


def test_labelled_steps_become_one_answer():
    labelled = {"prompt": "Why?", "completions": ["a", "b "], "labels": [True, None]}
    (row, other) = rows_of(labelled, {**labelled, "completions": ["a", ""]})
    assert row.group.completions_G == said("a", "b ")
    assert with_steps_joined(row, "##", "error").group.completions_G == said("a##b")
    bad = with_steps_joined(row, "a", "skip")
    assert bad.problem is not None
    assert "step 1 holds 'a', which separates steps" in bad.problem
    with pytest.raises(DataError, match="step 2 is empty"):
        with_steps_joined(other, "##", "error")
    (plain,) = rows_of({"prompt": "Why?", "completions": ["a", "b"]})
    assert with_steps_joined(plain, "##", "error") is plain


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (None, "labels"),
        ([], "2 steps in 'completions' and 0 entries in 'labels'"),
        ([1], "2 steps in 'completions' and 1 entries in 'labels'"),
        ([1, 7], "the label of step 2 is 7"),
    ],
)
def test_labels_that_do_not_fit_the_steps_are_told(labels, problem):
    row = {"prompt": "Why?", "completions": ["a", "b"], "labels": labels}
    for read in rows_of(row, {**row, "chosen": "a", "rejected": "b"}):
        assert read.group.completions_G == said("a", "b"), "other models read no labels"
        assert problem in str(with_steps_joined(read, "##", "skip").problem)
        with pytest.raises(DataError, match=f"stdin:.: .*{problem}"):
            with_steps_joined(read, "##", "error")


def test_labels_without_steps_change_nothing():
    (row,) = rows_of({"prompt": "Why?", "completion": "a", "completions": None, "labels": [1]})
    assert row.group.completions_G == said("a")
    assert with_steps_joined(row, "##", "error") is row


def refusal(row):
    with pytest.raises(DataError) as error:
        rows_of({"prompt": "ok", "completion": "ok"}, row)
    return str(error.value)


def test_a_conversation_is_its_last_message_after_the_others():
    group = group_of_row({"messages": [system("Be brief."), user("Why?"), assistant("Because.")]})
    assert group.prompt == (Message("system", "Be brief."), *ASKED)
    assert group.completions_G == said("Because.")


@pytest.mark.parametrize(
    "row",
    [
        {"context": "Why?", "completions": ["Because.", "No."]},
        {"prompt": [user("Why?")], "completions": ["Because.", "No."]},
        {"prompt": "Why?", "completions": [[assistant("Because.")], assistant("No.")]},
        {"prompt": "Why?", "completions": [{"completion": "Because."}, {"response": "No."}]},
        {
            "context": [user("Why?")],
            "completions": [
                {"rank": 1, "completion": [assistant("Because.")]},
                {"rank": 0, "completion": [assistant("No.")]},
            ],
        },
        {"prompt": "Why?", "completions": [[user("Why?"), assistant("Because.")], "No."]},
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        {
            "prompt": "Why?",
            "chosen": [user("Why?"), assistant("Because.")],
            "rejected": [user("Why?"), assistant("No.")],
            "messages": [user("not this")],
        },
        {"chosen": transcript("Why?", "Because."), "rejected": transcript("Why?", "No.")},
        {
            "context": [user("Why?")],
            "response1": "Because.",
            "response2": "No.",
            "overall_preference": 3,
        },
    ],
)
def test_completions_keep_the_order_of_the_row(row):
    group = group_of_row(row)
    assert group.prompt == ASKED
    assert group.completions_G == said("Because.", "No.")


@pytest.mark.parametrize(
    "said_in_row",
    [
        "",
        "Because.",
        [assistant("Let me see."), {"role": "tool", "content": "42"}, assistant("42.")],
    ],
)
@pytest.mark.parametrize("key", ["completion", "response"])
def test_one_completion_is_a_text_or_several_turns(key, said_in_row):
    (completion,) = group_of_row({"prompt": "Why?", key: said_in_row}).completions_G
    turns = [said_in_row] if isinstance(said_in_row, str) else ["Let me see.", "42", "42."]
    assert [message.content for message in completion.messages] == turns


def test_equal_rows_are_separate_groups_that_say_where_they_stand():
    row = {"id": "a", "prompt": "Why?", "completion": "Because."}
    first, second = rows_of(row, {**row, "id": 7})
    assert (first.source, second.source) == ("stdin:1", "stdin:2")
    assert first.group.id != second.group.id
    assert (first.id, second.id) == ("a", 7)


@pytest.mark.parametrize(
    ("row", "said_of_it"),
    [
        ({}, "(none)"),
        ({"prompt": None, "completion": "x"}, "keys prompt, completion"),
        ({"prompt": "Why?", "completions": []}, "empty"),
        ({"prompt": "Why?", "completions": "Because."}, "a string where a list"),
        ({"prompt": "Why?", "completions": ["a", None]}, "completion 2 is null"),
        ({"prompt": "Why?", "completions": [{"text": "a"}]}, "the keys text"),
        ({"prompt": "Why?", "completions": [[]]}, "ends with nothing"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is a number"),
        ({"prompt": "Why?", "chosen": None, "rejected": "No."}, "'chosen' is null"),
        ({"chosen": "Yes.", "rejected": "No."}, "keys chosen, rejected"),
        ({"messages": "Because."}, "a string where a list of messages"),
        ({"messages": [user("Why?")]}, "ends with 'user'"),
        ({"messages": [{"role": "assistant"}]}, "no {'role': ..., 'content': ...}"),
        ({"prompt": "Why?", "completion": "\ud800"}, "surrogate"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(row, said_of_it):
    message = refusal(row)
    assert message.startswith("stdin:2: ")
    assert said_of_it in message
    assert ", or set data.on_bad_row=skip to leave such rows out" in message


def test_a_line_that_is_no_json():
    stream = io.BytesIO(b'{"prompt": "a", "completion": "b"}\n\n{"prompt": \n')
    rows = read_scoring_rows("-", stdin=stream)
    next(rows)
    with pytest.raises(DataError, match=r"^stdin:3: column \d+: not JSON"):
        next(rows)


def test_standard_input_without_rows():
    with pytest.raises(DataError, match="standard input holds no rows"):
        rows_of()


def test_rows_are_read_as_they_are_asked_for():
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            line = b'{"prompt": "a", "completion": "b"}\n'
            buffer[: len(line)] = line
            return len(line)

    rows = read_scoring_rows("-", stdin=io.BufferedReader(Endless()))
    assert [row.source for row in itertools.islice(rows, 3)] == ["stdin:1", "stdin:2", "stdin:3"]

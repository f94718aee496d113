import pytest

from laurel.data.preferences import is_transcript, parse_transcript, split_transcripts
from laurel.data.sources import UnusableRow
from laurel.types import Message


def test_turns_lose_the_blanks_around_them_and_keep_those_within():
    parsed = parse_transcript("\n\nHuman: hi  there \n\nAssistant: one\n\ntwo\n\n")
    assert parsed == (Message("user", "hi  there"), Message("assistant", "one\n\ntwo"))


def test_a_speaker_counts_only_after_a_blank_line():
    (only,) = parse_transcript("\n\nHuman: she said\nAssistant: no, and Human: yes")
    assert only.content == "she said\nAssistant: no, and Human: yes"


def test_only_text_that_starts_with_human_is_a_transcript():
    assert is_transcript("\n\nHuman: hi")
    assert not is_transcript("Human: hi")
    assert not is_transcript(["\n\nHuman: hi"])
    with pytest.raises(UnusableRow, match="starts with"):
        parse_transcript("Human: hi\n\nAssistant: ho")


def test_what_two_transcripts_share_is_the_prompt():
    shared = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    prompt, chosen, rejected = split_transcripts(f"{shared} yes", f"{shared} no")
    assert [(turn.role, turn.content) for turn in prompt] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert chosen == (Message("assistant", "yes"),)
    assert rejected == (Message("assistant", "no"),)


def test_equal_transcripts_still_have_an_answer_each():
    same = "\n\nHuman: a\n\nAssistant: b"
    prompt, chosen, rejected = split_transcripts(same, same)
    assert prompt == (Message("user", "a"),)
    assert chosen == rejected == (Message("assistant", "b"),)


@pytest.mark.parametrize(
    ("chosen", "rejected", "kind"),
    [
        (
            "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c",
            "\n\nHuman: a\n\nAssistant: d",
            "transcripts part too early (2 and 1 turns left)",
        ),
        (
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: x\n\nAssistant: b",
            "transcripts part too early (2 and 2 turns left)",
        ),
        (
            "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c",
            "\n\nHuman: a\n\nAssistant: b\n\nAssistant: d",
            "turns do not alternate",
        ),
        ("\n\nHuman: a", "\n\nHuman: b", "transcript ends with Human"),
    ],
)
def test_transcripts_that_are_no_pair(chosen, rejected, kind):
    with pytest.raises(UnusableRow) as caught:
        split_transcripts(chosen, rejected)
    assert caught.value.kind == kind

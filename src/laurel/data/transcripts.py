"""Transcripts as HH-RLHF has them: one string in which `Human:` and `Assistant:` take turns."""

from __future__ import annotations

import re

from laurel.data.cells import UnusableRow, text
from laurel.types import Conversation, Message

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_START = "\n\nHuman:"


def is_transcript(value: object) -> bool:
    """Whether the value looks like a transcript."""
    return isinstance(value, str) and value.startswith(_START)


def parse_transcript(transcript: str) -> Conversation:
    """The turns, without the blanks around each. A turn may be empty, and roles may repeat."""
    before, *parts = _TURN.split(transcript)
    if before or not parts:
        raise UnusableRow(
            "no transcript",
            f"a transcript starts with {_START!r}, and this one with {before!r:.40}",
        )
    return tuple(
        Message(_ROLES[speaker], said.strip())
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    )


def split_transcripts(
    chosen: str, rejected: str
) -> tuple[Conversation, Conversation, Conversation]:
    """What two transcripts share, and the one assistant turn that each adds to it.

    Raises `UnusableRow` where they share less, or where the turns do not alternate. An empty turn
    is left for the caller to judge.
    """
    first = parse_transcript(text(chosen, what="the chosen transcript"))
    second = parse_transcript(text(rejected, what="the rejected transcript"))
    num_shared = 0
    for one, other in zip(first[:-1], second[:-1], strict=False):
        if one != other:
            break
        num_shared += 1
    tails = (len(first) - num_shared, len(second) - num_shared)
    if tails != (1, 1):
        raise UnusableRow(
            f"transcripts part too early ({tails[0]} and {tails[1]} turns left)",
            "the two transcripts must share everything but one last assistant turn; after what "
            f"they share, chosen goes on for {tails[0]} and rejected for {tails[1]} turns",
        )
    for conversation in (first, second):
        for place, message in enumerate(conversation):
            if message.role != ("user", "assistant")[place % 2]:
                raise UnusableRow(
                    "turns do not alternate",
                    f"turn {place + 1} of the transcript is spoken by '{message.role}' again: "
                    "Human and Assistant must take turns",
                )
        if len(conversation) % 2:
            raise UnusableRow(
                "transcript ends with Human", "the transcript must end with an Assistant turn"
            )
    return first[:num_shared], first[num_shared:], second[num_shared:]

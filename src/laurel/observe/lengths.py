"""The one definition of how long an answer is, and of what preferring the longer one would get.

Data reports, validations, evaluations and model cards count alike, so that their figures on the
same pairs are equal.
"""

from __future__ import annotations

from laurel.types import Conversation


def answer_length(messages: Conversation) -> int:
    """The characters of the contents of its messages: what a person sees, whatever the tokenizer.

    An answer that a model reads only in part, cut to fit, has its whole length.
    """
    return sum(len(message.content) for message in messages)


def longer_credit(better_length: float, worse_length: float) -> float:
    """What whoever prefers the longer answer gets of a pair: 1, 0, or half for equal lengths."""
    return 0.5 if better_length == worse_length else float(better_length > worse_length)

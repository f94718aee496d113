"""Tokens of a conversation as texts that can be shown, each with the role that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laurel.types import Conversation, Message

if TYPE_CHECKING:
    from laurel.types import Mask, TokenIds

TEMPLATE = "template"
"""What the template writes around messages."""
UNCLEAR = "unclear"
"""What stands beside a message that was cut, or that the template changed."""
_MOST_JOINED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A token; or the tokens, if it takes several to make a character."""

    ids: tuple[int, ...]
    text: str
    role: str
    """Of the message; `TEMPLATE` or `UNCLEAR` where it is in none."""
    is_learned: bool = False
    """Whether it counts in the loss."""
    is_pooled: bool = False
    """Whether the score is read from it."""


def pieces_of(
    tokenizer: Any,
    ids_L: TokenIds,
    conversation: Conversation,
    render: Callable[[Conversation], str],
    *,
    learned_L: Mask | None = None,
    pools_last: bool = False,
) -> list[Piece]:
    """The tokens of a conversation, perhaps cut at either end.

    Args:
        tokenizer: Of the model.
        ids_L: int32 [L].
        conversation: What they say.
        render: The text of a conversation, as the model's template has it.
        learned_L: bool [L]: which count in the loss; None: none.
        pools_last: Whether the score is read from the last one.
    """
    cut = _cut(tokenizer, [int(one) for one in ids_L])
    text = "".join(part for _, part in cut)
    roles = _roles(text, conversation, render)
    pieces: list[Piece] = []
    token = character = 0
    for ids, part in cut:
        inside = roles[character : character + len(part)]
        # A token may reach over a border; then it is said to be where most of it is.
        role = max(dict.fromkeys(inside), key=inside.count) if inside else TEMPLATE
        end = token + len(ids)
        pieces.append(
            Piece(
                ids=ids, text=part, role=role,
                is_learned=learned_L is not None and bool(learned_L[token:end].any()),
                is_pooled=pools_last and end == len(ids_L),
            )
        )  # fmt: skip
        token, character = end, character + len(part)
    return pieces


def _cut(tokenizer: Any, ids: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    """Each token with its text. One decoded alone would lose a leading blank, or half a letter."""
    cut: list[tuple[tuple[int, ...], str]] = []
    pending: list[int] = []
    before: list[int] = []
    for token in ids:
        pending.append(token)
        text = _decode(tokenizer, [*before, *pending])[len(_decode(tokenizer, before)) :]
        if text.endswith("\ufffd") and len(pending) < _MOST_JOINED:
            continue
        cut.append((tuple(pending), text))
        before, pending = [token], []
    if pending:
        text = _decode(tokenizer, [*before, *pending])[len(_decode(tokenizer, before)) :]
        cut.append((tuple(pending), text))
    return cut


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- roles


def _roles(
    text: str, conversation: Conversation, render: Callable[[Conversation], str]
) -> list[str]:
    """The role of each character."""
    whole, spans = _rendered(conversation, render)
    start = whole.find(text) if spans is not None else -1
    if spans is None or start < 0:
        return _searched(text, conversation)
    roles = [TEMPLATE] * len(whole)
    for message, (first, end) in zip(conversation, spans, strict=True):
        roles[first:end] = [message.role] * (end - first)
    return roles[start : start + len(text)]


def _rendered(
    conversation: Conversation, render: Callable[[Conversation], str]
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and where each message stands in it; None for a template that does more than copy.

    Marks are rendered in the place of the messages, and the messages put where the marks are.
    """
    whole = render(conversation)
    marks = [f"laurelmark{place}end" for place in range(len(conversation))]
    frame = render(
        tuple(Message(one.role, mark) for one, mark in zip(conversation, marks, strict=True))
    )
    for said in (
        [message.content for message in conversation],
        [message.content.strip() for message in conversation],
    ):
        spans: list[tuple[int, int]] = []
        built, rest = "", frame
        for mark, content in zip(marks, said, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                break
            built += before
            spans.append((len(built), len(built) + len(content)))
            built += content
        if len(spans) == len(conversation) and built + rest == whole:
            return whole, spans
    return whole, None


def _searched(text: str, conversation: Conversation) -> list[str]:
    """Messages that are found one after the other; what is beside one that is not is unclear."""
    roles = [UNCLEAR] * len(text)
    position, is_clear = 0, True
    for message in conversation:
        content = message.content.strip()
        found = text.find(content, position) if content else -1
        if found < 0:
            is_clear = False
            continue
        if is_clear:
            roles[position:found] = [TEMPLATE] * (found - position)
        roles[found : found + len(content)] = [message.role] * len(content)
        position, is_clear = found + len(content), True
    if is_clear:
        roles[position:] = [TEMPLATE] * (len(text) - position)
    return roles

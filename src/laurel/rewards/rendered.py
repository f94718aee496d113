"""Conversations that clients have rendered themselves, on their way through what takes groups.

Such a group has an empty prompt, and each of its completions is one message: of the role
`<rendered>` with the text, of the role `<token ids>` with the ids and a blank between them, or of
the role `<sent turn>` with a prompt and a response as JSON. So routers and servers pass it on as
any other; a batcher reads it, and nobody else should get it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from laurel.types import Completion, Group, Message, SentTurn

Rendered = str | tuple[int, ...] | SentTurn
"""A whole conversation as its client has sent it: rendered text, the ids of its tokens, or a prompt
of which only the model's contract can tell whether it was rendered, with its response."""
_RENDERED, _TOKEN_IDS, _SENT_TURN = "<rendered>", "<token ids>", "<sent turn>"


def rendered_group(rows: Sequence[Rendered]) -> Group:
    """Conversations that a client has rendered, as a group that a batcher understands."""
    return Group(
        id="",
        prompt=(),
        completions_G=tuple(Completion(messages=(_message(row),)) for row in rows),
    )


def _message(row: Rendered) -> Message:
    if isinstance(row, str):
        return Message(_RENDERED, row)
    if isinstance(row, SentTurn):
        return Message(_SENT_TURN, json.dumps([row.prompt, row.response, row.is_rendered]))
    return Message(_TOKEN_IDS, " ".join(map(str, row)))


def rendered_rows(group: Group) -> list[Rendered | None] | None:
    """The conversations of a group that a client has rendered, None for what cannot be read;
    None where it is a group like all others."""
    if group.prompt or not group.completions_G:
        return None
    rows: list[Rendered | None] = []
    for completion in group.completions_G:
        if len(completion.messages) != 1:
            return None
        (said,) = completion.messages
        if said.role == _RENDERED:
            rows.append(said.content)
        elif said.role == _SENT_TURN:
            rows.append(_turn(said.content))
        elif said.role == _TOKEN_IDS:
            rows.append(_ids(said.content))
        else:
            return None
    return rows


def _turn(text: str) -> SentTurn | None:
    try:
        prompt, response, is_rendered = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(prompt, str) or not isinstance(response, str):
        return None
    return SentTurn(prompt, response, None if is_rendered is None else bool(is_rendered))


def _ids(text: str) -> tuple[int, ...] | None:
    if re.fullmatch(r"(\d{1,10}( \d{1,10})*)?", text, re.ASCII) is None:
        return None
    ids = tuple(map(int, text.split()))
    return ids if all(one < 2**31 for one in ids) else None

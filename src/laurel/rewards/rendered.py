"""Conversations that clients have rendered themselves, on their way through what takes groups.

Such a group has an empty prompt, and each of its completions is one message: of the role
`<rendered>` with the text, or of the role `<token ids>` with the ids and a blank between them. So
routers and servers pass it on as any other; a batcher reads it, and nobody else should get it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from laurel.types import Completion, Group, Message

Rendered = str | tuple[int, ...]
"""A whole conversation as its client has rendered it: text, or the ids of its tokens."""
_RENDERED, _TOKEN_IDS = "<rendered>", "<token ids>"


def rendered_group(rows: Sequence[Rendered]) -> Group:
    """Conversations that a client has rendered, as a group that a batcher understands."""
    return Group(
        id="",
        prompt=(),
        completions_G=tuple(
            Completion(
                messages=(
                    Message(_RENDERED, row)
                    if isinstance(row, str)
                    else Message(_TOKEN_IDS, " ".join(map(str, row))),
                )
            )
            for row in rows
        ),
    )


def rendered_rows(group: Group) -> list[Rendered | None] | None:
    """The conversations of a group that a client has rendered, None for what is no list of ids;
    None where it is a group like all others."""
    if group.prompt or not group.completions_G:
        return None
    rows: list[Rendered | None] = []
    for completion in group.completions_G:
        if len(completion.messages) != 1:
            return None
        (said,) = completion.messages
        if said.role not in (_RENDERED, _TOKEN_IDS):
            return None
        rows.append(said.content if said.role == _RENDERED else _ids(said.content))
    return rows


def _ids(text: str) -> tuple[int, ...] | None:
    if re.fullmatch(r"(\d{1,10}( \d{1,10})*)?", text, re.ASCII) is None:
        return None
    ids = tuple(map(int, text.split()))
    return ids if all(one < 2**31 for one in ids) else None

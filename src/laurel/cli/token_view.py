"""How tokens look on a terminal: by role, with those that count in the loss and the pooled one.

Colour only repeats what the layout says: each line names its role, how many tokens it has and
what they are for, so nothing is lost without colours. These are of a palette that people with any
kind of colour vision can tell apart (Okabe and Ito, 2008), as backgrounds under black or white
letters, so that they can be read on light and dark terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from laurel.cli.first_row import FirstRow, Part
from laurel.cli.token_pieces import TEMPLATE, UNCLEAR, Piece
from laurel.observe.console import shorten_middle, visible
from laurel.observe.counts import counted

if TYPE_CHECKING:
    from rich.console import Console

ROLE_STYLES = {
    "system": "#000000 on #CC79A7",
    "user": "#000000 on #56B4E9",
    "assistant": "#000000 on #E69F00",
}
OTHER_ROLE = "#000000 on #F0E442"
LEARNED, POOLED = "bold underline", "bold #FFFFFF on #0072B2"
_HEAD, _TAIL = 80, 40
"""Tokens shown at each end of a long stretch."""
_TEXT_LENGTH = 600


def show_row(console: Console, row: FirstRow) -> None:
    """The row with its legend."""
    has_tokens = any(part.pieces for part in row.parts)
    separator = "│" if "utf" in (console.encoding or "").lower() else "|"
    for part in row.parts:
        console.print(Text(_title(part), style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        if has_tokens:
            table.add_column(no_wrap=True, justify="right")
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for cells in _token_lines(part, separator) if has_tokens else _message_lines(part):
            table.add_row(*cells)
        console.print(table)
    if has_tokens:
        _show_legend(console, [piece for part in row.parts for piece in part.pieces], separator)
    for note in row.notes:
        console.print(Text(f"note     {visible(note)}"), soft_wrap=True)


def style_of(role: str) -> str:
    """The colours of a role; none for what the template writes."""
    return "" if role in (TEMPLATE, UNCLEAR) else ROLE_STYLES.get(role, OTHER_ROLE)


def row_as_facts(row: FirstRow) -> dict[str, Any]:
    """The row as plain values, for JSON; all tokens are in it."""
    return {
        "source": row.source,
        "parts": [
            {
                "title": part.title,
                "messages": [{"role": m.role, "content": m.content} for m in part.messages],
                "was_cut": part.was_cut,
                "tokens": [
                    {
                        "ids": list(piece.ids),
                        "text": piece.text,
                        "role": piece.role,
                        "in_loss": piece.is_learned,
                        "pooled": piece.is_pooled,
                    }
                    for piece in part.pieces
                ],
            }
            for part in row.parts
        ],
        "notes": list(row.notes),
    }


# ------------------------------------------------------------------------------------------- lines


def _title(part: Part) -> str:
    if not part.pieces:
        return part.title
    num_tokens = _count(part.pieces)
    cut = ", cut to fit" if part.was_cut else ""
    return f"{part.title}: {counted(num_tokens, 'token')}{cut}"


def _count(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.ids) for piece in pieces)


def _message_lines(part: Part) -> Iterator[tuple[Text, ...]]:
    for message in part.messages:
        role = Text(f" {visible(message.role)} ", style=style_of(message.role))
        yield role, Text(shorten_middle(message.content, _TEXT_LENGTH) or "(empty)")


def _token_lines(part: Part, separator: str) -> Iterator[tuple[Text, ...]]:
    def kind(piece: Piece) -> tuple[str, bool, bool]:
        return piece.role, piece.is_learned, piece.is_pooled

    for (role, is_learned, is_pooled), group in groupby(part.pieces, kind):
        pieces = list(group)
        use = "score" if is_pooled else "loss" if is_learned else ""
        yield (
            Text(f" {visible(role)} ", style=style_of(role)),
            Text(str(_count(pieces))),
            Text(use, style=POOLED if is_pooled else LEARNED if is_learned else ""),
            _tokens(pieces, separator),
        )


def _tokens(pieces: Sequence[Piece], separator: str) -> Text:
    line = Text()
    hidden = range(_HEAD, len(pieces) - _TAIL)
    for place, piece in enumerate(pieces):
        if place in hidden:
            if place == hidden.start:
                left_out = _count(pieces[hidden.start : hidden.stop])
                line.append(f" ... {left_out:,} more tokens ... ", style="italic")
            continue
        if place and not (hidden and place == hidden.stop):
            line.append(separator)
        style = style_of(piece.role)
        if piece.is_learned:
            style = f"{LEARNED} {style}"
        if piece.is_pooled:
            line.append(f"[{visible(piece.text)}]", style=POOLED)
        else:
            line.append(visible(piece.text), style=style)
    return line


def _show_legend(console: Console, pieces: Sequence[Piece], separator: str) -> None:
    """What the marks mean; only those that occur."""
    roles = list(dict.fromkeys(piece.role for piece in pieces))
    line = Text("legend   ")
    for role in roles:
        if role not in (TEMPLATE, UNCLEAR):
            line.append(f" {visible(role)} ", style=style_of(role)).append("  ")
    console.print(line.append(f"{separator} stands between tokens"))
    meanings = {
        TEMPLATE: "what the chat template writes around messages",
        UNCLEAR: "beside a message that was cut, or that the template changed",
    }
    lines = [Text(f"{role}: {about}") for role, about in meanings.items() if role in roles]
    if any(piece.is_learned for piece in pieces):
        lines.append(Text("").append("loss", LEARNED).append(": these tokens count in the loss"))
    if any(piece.is_pooled for piece in pieces):
        what = ": the token from which the reward model reads the score"
        lines.append(Text("").append("[score]", POOLED).append(what))
    for one in lines:
        console.print(Text("         ").append_text(one))

"""Texts of models and data sets, made harmless for a page: nothing in them acts, nothing hides."""

from __future__ import annotations

import json
import unicodedata

from laurel.observe.console import shorten_middle, visible

_JOINERS = frozenset("\u200c\u200d")
"""Scripts and emoji are written with them; they hide nothing."""


def visible_lines(text: str) -> str:
    r"""The text in its lines, with what cannot be seen as escapes: `\x1b`, `\u202e`, `\u200b`."""
    return "\n".join(_shown(line) for line in text.split("\n"))


def shortened(text: str, length: int) -> str:
    """The same of a text that may be long: its start and its end, in its lines."""
    if len(text) <= length:
        return visible_lines(text)
    half = length // 2
    left_out = len(text) - 2 * half
    start, end = visible_lines(text[:half]), visible_lines(text[-half:])
    return f"{start} [... {left_out:,} characters ...] {end}"


def one_line(text: str, length: int) -> str:
    """The text as one line, not too long."""
    return _shown(shorten_middle(text, length))


def script_json(value: object) -> str:
    """JSON that may stand inside a `<script>` element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _shown(text: str) -> str:
    text = visible(text)
    if text.isascii():
        return text
    return "".join(_escape(char) if _is_invisible(char) else char for char in text)


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) == "Cf" and character not in _JOINERS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

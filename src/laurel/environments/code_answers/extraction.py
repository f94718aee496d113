"""The program in a completion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from laurel.protocols import MessageLog

# Nothing is tried twice, or a long line of a hostile text would take for ever.
_OPENING = re.compile(r"^[ \t]*+`{3,}+[ \t]*+([\w.+-]*+)[^`]*+$|[^`]`{3,}+([\w.+-]*+)[ \t]*+\r?$")
"""A line that a block begins after: with its language first, or at its end."""
_PYTHON = ("python", "py", "python3")
_OPEN_TAG, _CLOSE_TAG = "<code>", "</code>"
_STOPPED = re.compile(r"\n(?:async def|def|class|if|print|assert|import|from|@|#|```)[ \t(]*\Z")
"""What a stop string that begins the next thing of a file leaves behind."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    """As it says after the fence, in lower case; may be empty."""
    code: str


def last_said(message_log: MessageLog) -> str:
    """The policy's last message; empty where it has said nothing."""
    said = (m["content"] for m in reversed(message_log) if m["role"] == "assistant")
    return next(said, "")


def tagged(text: str) -> tuple[str, str] | None:
    """The last `<code>` of a text and what follows it; None where there is none.

    One that is not closed ends with the text: the stop string may have been left out of it.
    """
    _, opened, rest = text.rpartition(_OPEN_TAG)
    if not opened:
        return None
    code, _, after = rest.partition(_CLOSE_TAG)
    inside = fenced(code)
    return (inside[-1].code if inside else code), after


def fenced(text: str) -> list[Block]:
    """The blocks between fences of backticks; the last may lack its end."""
    found: list[Block] = []
    language: str | None = None
    lines: list[str] = []

    def close() -> None:
        if language is not None:
            found.append(Block(language, "\n".join(lines)))

    for line in text.split("\n"):
        opening = _OPENING.search(line)
        begun = None if opening is None else (opening[1] or opening[2] or "").lower()
        bare = line.strip()
        if language is None:
            if begun is not None:
                language, lines = begun, []
        elif bare.endswith("```") or bare.startswith("```"):
            if before := line.rstrip().removesuffix("```").rstrip("`").rstrip():
                lines += [] if bare.startswith("```") else [before]
            close()
            # A block may begin where the one before it was not ended.
            language, lines = begun or None, []
        else:
            lines.append(line)
    close()
    return found


def program_of(text: str, *, entry: str = "", prefix: str = "") -> str | None:
    """The program that a completion is meant to be; None where it holds none.

    It is the last fenced block of Python (of those that define the function, if any does), else the
    last fenced block, else the last `<code>`, else all of the text. Where there is a prefix: a
    program that does not define the function goes on where the prefix ends; one that does
    comes after it, for what the prefix imports and defines.

    Args:
        text: The completion.
        entry: Name of the function that is asked for; empty: none is.
        prefix: What the completion may go on from, such as the head of the function.
    """
    code, is_block = _written(text, entry)
    if not code.strip():
        return None
    if prefix:
        return joined(code, entry=entry, prefix=prefix)
    if not is_block and entry and not re.search(rf"\b{re.escape(_first(entry))}\b", code):
        return None  # words, not a program: it could not have the function
    return code


def joined(code: str, *, entry: str, prefix: str) -> str:
    """A program and what comes before it; see `program_of`."""
    if not prefix:
        return code
    if not entry or not _defines(code, entry):
        return prefix + _STOPPED.sub("\n", code)
    if "from __future__" in code or not _compiles(prefix):
        return code
    return f"{prefix}\n\n{code}"


def _written(text: str, entry: str) -> tuple[str, bool]:
    """The code, and whether it was marked as such."""
    blocks = fenced(text)
    python = [block for block in blocks if block.language in _PYTHON]
    defining = [
        block
        for block in python
        if entry and (_defines(block.code, entry) or _solves(block.code, entry))
    ]
    if chosen := defining or python or blocks:
        return chosen[-1].code, True
    found = tagged(text)
    return (found[0], True) if found is not None else (text, False)


def _first(entry: str) -> str:
    return entry.partition(".")[0]


def _defines(code: str, entry: str) -> bool:
    name = re.escape(_first(entry))
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    return re.search(pattern, code, re.MULTILINE) is not None


def _solves(code: str, entry: str) -> bool:
    """Whether a class Solution has the function as a method."""
    method = rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b"
    return (
        re.search(r"^class[ \t]+Solution\b", code, re.MULTILINE) is not None
        and re.search(method, code, re.MULTILINE) is not None
    )


@lru_cache(maxsize=4096)
def _compiles(prefix: str) -> bool:
    """Whether a text of the data set is Python by itself."""
    try:
        compile(prefix, "prefix", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True

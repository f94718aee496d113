"""Finds the program in a completion, and runs code as a tool."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import resources
from typing import Any

from laurel.environments.interface import cut_middle
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, SandboxResult, Status

# Possessive quantifiers: with backtracking a long hostile line would take forever.
# A line that a block begins after: with its language first, or at its end.
_OPENING = re.compile(r"^[ \t]*+`{3,}+[ \t]*+([\w.+-]*+)[^`]*+$|[^`]`{3,}+([\w.+-]*+)[ \t]*+\r?$")
_PYTHON = ("python", "py", "python3")
_OPEN_TAG, _CLOSE_TAG = "<code>", "</code>"
_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+\w+[ \t]*[(:]", re.MULTILINE)
# The remainder of a stop string that begins the next statement of a file.
_STOPPED = re.compile(r"\n(?:async def|def|class|if|print|assert|import|from|@|#|```)[ \t(]*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block in an answer."""

    language: str
    """The language after the fence, in lower case; it may be empty."""
    code: str


def tagged(text: str) -> tuple[str, str] | None:
    """Return the content of the last `<code>` of a text, and the text after it; None without one.

    A block that is not closed ends with the text, because the stop string may be missing.
    """
    _, opened, rest = text.rpartition(_OPEN_TAG)
    if not opened:
        return None
    code, _, after = rest.partition(_CLOSE_TAG)
    inside = fenced(code)
    return (inside[-1].code if inside else code), after


def fenced(text: str) -> list[Block]:
    """Return the blocks between fences of backticks, of which the last may be unclosed."""
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
            # A block may begin where the previous one was not closed.
            language, lines = begun or None, []
        else:
            lines.append(line)
    close()
    return found


def program_of(text: str, *, entry: str = "", prefix: str = "") -> str | None:
    """Return the program that a completion contains; None if there is none.

    It is the last fenced block of Python (of those that define the function, if any does), else the
    last fenced block, else the last `<code>`, else the whole text. A program that does not define
    the function continues the prefix. One that does follows the prefix, to use its imports and
    definitions.

    Args:
        entry: The name of the function that the task requires; empty if it requires none.
        prefix: Code that the completion may continue, such as the head of the function.
    """
    blocks = fenced(text)
    python = [block for block in blocks if block.language in _PYTHON]
    defining = [
        block
        for block in python
        if entry and (_defines(block.code, entry) or _solves(block.code, entry))
    ]
    is_block = True
    if chosen := defining or python or blocks:
        code = chosen[-1].code
    elif (found := tagged(text)) is not None:
        code = found[0]
    else:
        code, is_block = text, False
    if not code.strip():
        return None
    if prefix:
        return join_code(code, entry=entry, prefix=prefix)
    is_program = is_block or not entry or has_name(code, entry) or _DEFINITION.search(code)
    if not is_program:
        return None  # prose: it cannot have the function
    return code


def has_name(code: str, entry: str) -> bool:
    """Report whether a text has the name of a function as a word; of `Class.name`, the class."""
    return re.search(rf"\b{re.escape(_first(entry))}\b", code) is not None


def join_code(code: str, *, entry: str, prefix: str) -> str:
    """Prepend the task's code `prefix` to a program.

    A program that defines the function `entry` follows the prefix, or is used alone if the two
    cannot be combined; any other program continues the prefix.
    """
    if not prefix:
        return code
    if not entry or not _defines(code, entry):
        return prefix + _STOPPED.sub("\n", code)
    if "from __future__" in code or not _compiles(prefix):
        return code
    return f"{prefix}\n\n{code}"


def _first(entry: str) -> str:
    return entry.partition(".")[0]


def _defines(code: str, entry: str) -> bool:
    name = re.escape(_first(entry))
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    return re.search(pattern, code, re.MULTILINE) is not None


def _solves(code: str, entry: str) -> bool:
    method = rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b"
    return (
        re.search(r"^class[ \t]+Solution\b", code, re.MULTILINE) is not None
        and re.search(method, code, re.MULTILINE) is not None
    )


@lru_cache(maxsize=4096)
def _compiles(prefix: str) -> bool:
    """Report whether a text of the data set is valid Python by itself."""
    try:
        compile(prefix, "prefix", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# Code as a tool: variables last from turn to turn, and no process runs in between.
#
# Only the code itself is kept. Every turn is a fresh process that runs the earlier blocks again,
# silently, with the same seed of `random`, and then the new one: no data of a program is ever read
# from it. So side effects are repeated; a clock and `os.urandom` may differ the next time; and the
# cost of a turn grows with the number of turns before it. A block that raised is run again up to
# where it raised. A block that its process did not survive (a limit, `os._exit`) is undone: later
# turns run without it.

_SPARE = 2.0  # factor on the time that the earlier blocks took before
_DEATHS = {
    Status.TIMEOUT_CPU: "TimeoutError: it took more than {cpu_s:g} s of computing time",
    Status.TIMEOUT_WALL: "TimeoutError: it took more than {wall_s:g} s",
    Status.MEMORY_LIMIT: "MemoryError: it took more than {mem_mb} MB",
    Status.OUTPUT_LIMIT: "OSError: it printed more than {stdout_kb} kB",
    Status.DISK_LIMIT: "OSError: it wrote more than {disk_mb} MB",
    Status.FORBIDDEN: "PermissionError: it asked the system for what is not given here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The blocks that a conversation has run so far, which its metadata holds as plain data."""

    blocks: tuple[str, ...] = ()
    cpu_s: float = 0.0
    wall_s: float = 0.0
    """The wall time of the last turn, including earlier blocks."""
    num_calls: int = 0
    num_errors: int = 0

    @classmethod
    def of(cls, given: Any) -> Session:
        """Read a session from metadata, or create a new one.

        Raises:
            ValueError: The metadata is not a result of `as_metadata`.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or not given.keys() <= set(cls.__slots__):
            raise ValueError(f"code_session is {type(given).__name__}, and not what this returned")
        return cls(**{**given, "blocks": tuple(given.get("blocks", ()))})

    def as_metadata(self) -> dict[str, Any]:
        """Return the metadata that `of` reads."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "blocks": list(self.blocks)
        }

    def job(self, code: str, *, limits: Limits, most: int) -> SandboxJob:
        """Return the job that runs the next block after the earlier ones.

        Earlier blocks get their former time and a margin. A value is cut after `most` characters.
        """
        code = _dedented(code)
        request = {"blocks": self.blocks, "code": code, "mark": self._mark(code), "most": most}
        return SandboxJob(
            code=f"{_program()}\nmain(json.loads({json.dumps(request)!r}))\n",
            limits=replace(
                limits,
                cpu_s=limits.cpu_s + _SPARE * self.cpu_s,
                wall_s=limits.wall_s + _SPARE * self.wall_s,
            ),
        )

    def after(self, code: str, result: SandboxResult, limits: Limits) -> tuple[Session, BlockReply]:
        """Return the session after a turn, and the reply to the policy."""
        code = _dedented(code)
        mark = self._mark(code)
        printed, ended, answer = result.stdout.rpartition(f"{mark}{{")
        reply = _read(answer) if ended else None
        if reply is None:
            printed = result.stdout.rpartition(mark)[2]
            death = _DEATHS.get(
                result.status, "RuntimeError: the process ended before the code did"
            )
            kind, text = "killed", death.format(**limits.message())
        else:
            printed = printed.rpartition(mark)[2]
            kind, text = reply
        failed = kind in ("error", "killed")
        session = replace(
            self, num_calls=self.num_calls + 1, num_errors=self.num_errors + int(failed)
        )
        if kind != "killed":
            session = replace(
                session,
                blocks=(*self.blocks, code),
                cpu_s=result.cpu_s or 0.0,
                wall_s=result.wall_s,
            )
        shown = "\n".join(part for part in (printed.rstrip("\n"), text) if part)
        return session, BlockReply(text=shown, value=text if kind == "value" else None)

    def _mark(self, code: str) -> str:
        # No output holds it by chance, and a repeated turn has the same one.
        digest = blake2b(json.dumps([self.blocks, code]).encode(), digest_size=16)
        return f"\n\x00{digest.hexdigest()}\x00"


@dataclass(frozen=True, slots=True)
class BlockReply:
    """The reply to the policy on a block of code."""

    text: str
    """The output of the block, and the value of its last statement or its error."""
    value: str | None
    """The value of the last statement if that is an expression that was evaluated; may be empty."""


def observation(reply: BlockReply, code: str, after: str, *, most: int) -> str:
    """Return a result as text for the policy; empty if there is no result.

    The text `after` the block in the policy's last token is not repeated.
    """
    if not reply.text:
        return ""
    shown = cut_middle(reply.text, most)
    has_lines = "\n" in shown or "\n" in code
    result = f"\n\n<result>\n{shown}\n</result>" if has_lines else f"<result>{shown}</result>"
    return result.removeprefix(after)


def _dedented(code: str) -> str:
    return textwrap.dedent(code.replace("\r\n", "\n")).strip("\n").rstrip()


def _read(answer: str) -> tuple[str, str] | None:
    try:
        reply, _ = json.JSONDecoder().raw_decode("{" + answer)
        kind, text = reply["kind"], reply["text"]
    except (ValueError, KeyError, RecursionError):
        return None
    if kind not in ("value", "done", "error") or not isinstance(text, str):
        return None
    return kind, text


@cache
def _program() -> str:
    source = resources.files("laurel.extensions.code").joinpath("replay.py")
    return source.read_text(encoding="utf-8")

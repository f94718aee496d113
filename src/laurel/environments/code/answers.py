"""The program in a completion."""

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

from laurel.protocols import MessageLog
from laurel.sandbox.jobs import Limits, SandboxJob, SandboxResult, Status

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
        return join_code(code, entry=entry, prefix=prefix)
    if not is_block and entry and not re.search(rf"\b{re.escape(_first(entry))}\b", code):
        return None  # words, not a program: it could not have the function
    return code


def join_code(code: str, *, entry: str, prefix: str) -> str:
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


# --------------------------------------------------------------------------------------------------
# Code as a tool: variables last from turn to turn, and nothing is left running in between.
#
# What lasts is the code itself. Every turn is a fresh process that runs the earlier blocks again,
# silently, with the same seed of `random`, and then the new one: nothing that a program made is
# ever
# read from it. So side effects are repeated; a clock and `os.urandom` may say something else the
# next time; and the cost of a turn grows with the number of turns before it. A block that raised is
# run again up to where it raised. One that its process did not survive (a limit, `os._exit`) is
# undone: later turns begin as if it had not been.

_SPARE = 2.0
"""How much longer than before the earlier blocks may take."""
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
    """What a conversation has run so far. Plain data, as metadata holds it."""

    blocks: tuple[str, ...] = ()
    cpu_s: float = 0.0
    wall_s: float = 0.0
    """Of the last turn, earlier blocks included."""
    num_calls: int = 0
    num_errors: int = 0

    @classmethod
    def of(cls, said: Any) -> Session:
        """From metadata; a new one where that says nothing.

        Raises:
            ValueError: It is not what `as_metadata` made.
        """
        if said is None:
            return cls()
        if not isinstance(said, Mapping) or not said.keys() <= set(cls.__slots__):
            raise ValueError(f"code_session is {type(said).__name__}, and not what this returned")
        return cls(**{**said, "blocks": tuple(said.get("blocks", ()))})

    def as_metadata(self) -> dict[str, Any]:
        """What `of` reads."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "blocks": list(self.blocks)
        }

    def job(self, code: str, *, limits: Limits, most: int) -> SandboxJob:
        """The next block, after the earlier ones.

        Args:
            code: The block.
            limits: Of the block alone; the earlier ones get what they took, and some to spare.
            most: Characters of a value.
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
        """What a turn came to.

        Args:
            code: The block, as it was given to `job`.
            result: Of that job: a verdict.
            limits: As given to `job`.
        """
        code = _dedented(code)
        mark = self._mark(code)
        printed, ended, said = result.stdout.rpartition(f"{mark}{{")
        reply = _read(said) if ended else None
        if reply is None:
            printed = result.stdout.rpartition(mark)[2]
            kind, text = "killed", _death(result, limits)
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
        # The tokenizer takes no halves of surrogate pairs.
        shown = "\n".join(part for part in (printed.rstrip("\n"), text) if part)
        shown = shown.encode("utf-8", "replace").decode()
        return session, BlockReply(text=shown, value=text if kind == "value" else None)

    def _mark(self, code: str) -> str:
        """What no output holds by chance; the same each time."""
        digest = blake2b(json.dumps([self.blocks, code]).encode(), digest_size=16)
        return f"\n\x00{digest.hexdigest()}\x00"


@dataclass(frozen=True, slots=True)
class BlockReply:
    """What the policy is told of a block."""

    text: str
    """What it printed, and the value of its last statement or its error."""
    value: str | None
    """That value, where the last statement is an expression and was evaluated; may be empty."""


def observation(reply: BlockReply, code: str, after: str, *, most: int) -> str:
    """A result as the policy sees it; empty where there is nothing to be seen.

    Args:
        reply: The result.
        code: Of which block.
        after: What the policy's last token said after the block, which is not said again.
        most: Characters of the result.
    """
    if not reply.text:
        return ""
    shown = cut_middle(reply.text, most)
    has_lines = "\n" in shown or "\n" in code
    said = f"\n\n<result>\n{shown}\n</result>" if has_lines else f"<result>{shown}</result>"
    return said.removeprefix(after)


def cut_middle(text: str, most: int) -> str:
    """The text, without its middle where it is longer than that."""
    if len(text) <= most:
        return text
    half = most // 2
    left_out = f"\n[... {len(text) - 2 * half} characters left out ...]\n"
    return text[:half] + left_out + text[-half:]


def _dedented(code: str) -> str:
    return textwrap.dedent(code.replace("\r\n", "\n")).strip("\n").rstrip()


def _read(said: str) -> tuple[str, str] | None:
    """The kind and text of a reply; None where it is none."""
    try:
        reply, _ = json.JSONDecoder().raw_decode("{" + said)
        kind, text = reply["kind"], reply["text"]
    except (ValueError, KeyError, RecursionError):
        return None
    if kind not in ("value", "done", "error") or not isinstance(text, str):
        return None
    return kind, text


def _death(result: SandboxResult, limits: Limits) -> str:
    said = _DEATHS.get(result.status, "RuntimeError: the process ended before the code did")
    return said.format(**limits.message())


@cache
def _program() -> str:
    source = resources.files("laurel.environments.code").joinpath("replay.py")
    return source.read_text(encoding="utf-8")

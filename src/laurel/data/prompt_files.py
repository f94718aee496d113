"""The files that are put around a prompt: a text for the first question, a system message."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from laurel.data.cells import UnusableRow
from laurel.errors import DataError
from laurel.types import Conversation, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFrame:
    """What is put around every prompt; nothing where both are None."""

    question: str | None = None
    """Text with `{}` where the first user message goes; `{{` and `}}` are plain braces."""
    system: str | None = None
    """Put first, as a message of role `system`."""

    def around(self, prompt: Conversation) -> Conversation:
        """The prompt inside the frame. A prompt without a user message is an unusable row."""
        framed = prompt
        if self.question is not None:
            asked = next((i for i, turn in enumerate(prompt) if turn.role == "user"), None)
            if asked is None:
                raise UnusableRow(
                    "no user message for the prompt file",
                    "the prompt has no user message to put into data.prompt_file",
                )
            turn = Message("user", self.question.format(prompt[asked].content))
            framed = (*prompt[:asked], turn, *prompt[asked + 1 :])
        if self.system is not None:
            framed = (Message("system", self.system), *framed)
        return framed


def read_prompt_frame(prompt_file: str | None, system_prompt_file: str | None) -> PromptFrame:
    """The frame that the two files describe, each checked. Raises DataError."""
    question = None if prompt_file is None else _read(prompt_file, key="data.prompt_file")
    if question is not None:
        _check_question(question, prompt_file or "")
    system = (
        None
        if system_prompt_file is None
        else _read(system_prompt_file, key="data.system_prompt_file")
    )
    return PromptFrame(question=question, system=system)


def _read(path: str, *, key: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{key}: {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{key}: {path} cannot be read as UTF-8 text: {problem}") from problem


def _check_question(question: str, path: str) -> None:
    advice = "write {} once, where the question goes, and {{ }} for plain braces"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(question) if name is not None]
    except ValueError as problem:
        raise DataError(f"data.prompt_file: {path}: {problem}; {advice}") from problem
    if not fields or set(fields) not in ({""}, {"0"}) or (fields[0] == "" and len(fields) > 1):
        shown = ", ".join(f"{{{name}}}" for name in fields) or "none"
        raise DataError(
            f"data.prompt_file: {path} must have one place for the question, and has: {shown}; "
            f"{advice}"
        )
    try:
        question.format("")
    except (ValueError, LookupError) as problem:
        raise DataError(f"data.prompt_file: {path}: {problem}; {advice}") from problem

"""Functions that the tests give to policies as tools."""

import asyncio
import os
import time
from typing import Literal


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    return left + right


def convert(
    text: str, case: Literal["upper", "lower"], parts: tuple[float, float] = (0, 0)
) -> dict:
    """Convert a text.

    Args:
        text: The text.
        case: How it comes out.
        parts: Numbers.
    """
    return {"text": getattr(text, case)(), "parts": list(parts), "kind": type(parts).__name__}


def choose(color: str) -> str:
    """Choose a color.

    Args:
        color: The color (choices: ["red", "blue"])
    """
    return f"chosen: {color}"


async def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    if word == "surrogate":
        return "\ud800"
    if word == "long":
        return "x" * 10_000
    raise KeyError(word)


def leave() -> str:
    """Leave the program."""
    raise SystemExit(3)


def hang(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def die() -> str:
    """End the process."""
    os._exit(1)


def undocumented(left: int) -> int:
    return left


def unhinted(left):
    """Do something.

    Args:
        left: A number.
    """


def open_ended(*parts: int) -> int:
    """Do something.

    Args:
        parts: Numbers.
    """
    return len(parts)


def strange(left: object) -> int:
    """Do something.

    Args:
        left: Anything.
    """
    return 1


NUMBER = 4


def secret(key: int) -> str:
    """Tell a secret.

    Args:
        key: Its key.
    """
    return str((7 * key + 3) % 10)

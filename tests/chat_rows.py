"""Messages and transcripts as rows of data hold them."""

from __future__ import annotations


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def transcript(*turns: str) -> str:
    """Say the turns in the form of HH-RLHF, beginning with the human."""
    speakers = ("Human", "Assistant")
    return "".join(f"\n\n{speakers[i % 2]}: {text}" for i, text in enumerate(turns))

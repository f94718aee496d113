"""The values of answer checking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["correct", "incorrect", "unparseable", "timeout", "error"]
"""`unparseable`: the response holds no answer that can be read. `timeout`: it holds one that could
not be checked within the limits of time and memory. Both are the policy's doing and worth 0.
`error`: the checker is to blame, or the known answer is; there is no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What may be the answer in a response."""

    text: str
    boxed: bool = True
    """Whether it is all answer, as in a box, or a passage in which the answer is to be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The verdict on one response."""

    verdict: Verdict
    answer: str | None = None
    """The answer as it was read."""
    reason: str | None = None
    """Why there is no verdict; set exactly for `error`."""

"""Many responses at once, each against its known answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from laurel.environments.interface import Memory
from laurel.environments.math.answers import (
    Candidate,
    Checked,
    in_known_characters,
    is_absurd,
    is_unevaluated,
    read_answer,
    same_or_not,
    too_much_to_read,
)
from laurel.sandbox.limits import available_cores
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec

LONGEST_KNOWN_ANSWER = 10_000
MEMORY_LIMIT = 2 << 30
"""Address space of a process that checks, in bytes."""
ITEMS_OF_A_LIFE = 2_000
"""Answers that one process checks before a fresh one takes its place; its caches only grow."""
_REMEMBERED = 50_000
# What processes need to find Python and libraries; no keys or tokens of the trainer.
_KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE",
)
# Python integers: those of gmpy2 do long computations that nothing can interrupt.
_OWN_VARIABLES = {
    "SYMPY_GROUND_TYPES": "python",
    "MALLOC_ARENA_MAX": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that a process has, and how its verdict will be remembered."""

    key: bytes
    candidate: Candidate
    future: Future[Any]

    def checked(self) -> Checked:
        """Wait for the verdict."""
        shown = self.candidate.text if self.candidate.boxed else None
        try:
            return Checked(**self.future.result())
        except TimeoutError:
            return Checked(verdict="timeout", answer=shown)
        except ProcessDiedError:
            reason = "the process that checks answers died of this one twice"
            return Checked(verdict="error", answer=shown, reason=reason)


class AnswerChecker:
    """Checks mathematical answers. May be called from several threads at once."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_seconds: float,
        forbid_unevaluated: bool = True,
        items_of_a_life: int = ITEMS_OF_A_LIFE,
    ) -> None:
        """Start nothing yet.

        Args:
            num_workers: Processes that check what takes a parser; at most one per core that this
                process may use.
            timeout_seconds: Limit of one answer in them.
            forbid_unevaluated: See `MathEnvironmentConfig.forbid_unevaluated`.
            items_of_a_life: Answers after which a process is replaced.
        """
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self.pool = ProcessPool(
            ProcessPoolSpec(
                name="the checker of answers",
                prepare="laurel.environments.math.comparison:prepare",
                num_workers=min(num_workers, available_cores()),
                timeout_seconds=timeout_seconds,
                attempts=2,  # it may have died by another's hand
                items_of_a_life=items_of_a_life,
                memory_limit=MEMORY_LIMIT,
                environment=kept | _OWN_VARIABLES,
            )
        )
        self._forbid_unevaluated = forbid_unevaluated
        self._memory: Memory[Checked] = Memory(_REMEMBERED)

    def check(self, responses: Sequence[str], golds: Sequence[str]) -> list[Checked]:
        """The verdict on each response, in order."""
        under_way: dict[bytes, _Pending] = {}
        begun = [
            self._begin(response, gold, under_way)
            for response, gold in zip(responses, golds, strict=True)
        ]
        return [self._finish(one) if isinstance(one, _Pending) else one for one in begun]

    def check_gold(self, golds: Sequence[str]) -> list[Checked]:
        """The verdict of the parser on each known answer given as the answer, without shortcuts."""
        texts = [in_known_characters(gold).strip() for gold in golds]
        begun = [_unusable(text) or self._ask(b"", text, Candidate(text=text)) for text in texts]
        return [one if isinstance(one, Checked) else one.checked() for one in begun]

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.pool.close()

    def _begin(
        self, response: str, gold: str, under_way: dict[bytes, _Pending]
    ) -> Checked | _Pending:
        gold = in_known_characters(gold).strip()
        unusable = _unusable(gold)
        if unusable is not None:
            return unusable
        candidate = read_answer(response)
        if candidate is None:
            return Checked(verdict="unparseable")
        known = self._without_parser(gold, candidate)
        if known is not None:
            return known
        key = _key(gold, candidate)
        remembered = self._memory.get(key)
        if remembered is not None:
            return remembered
        if key not in under_way:
            under_way[key] = self._ask(key, gold, candidate)
        return under_way[key]

    def _without_parser(self, gold: str, candidate: Candidate) -> Checked | None:
        answer = candidate.text if candidate.boxed else None
        same = same_or_not(gold, candidate)
        if same is not None:
            text = answer if answer is not None else _last_word(candidate.text)
            return Checked(verdict="correct" if same else "incorrect", answer=text)
        if not candidate.boxed:
            return None
        if too_much_to_read(candidate.text):
            return Checked(verdict="unparseable")
        if self._forbid_unevaluated and is_unevaluated(answer or "") and not is_unevaluated(gold):
            return Checked(verdict="incorrect", answer=answer)
        if is_absurd(candidate.text) and not is_absurd(gold):
            return Checked(verdict="incorrect", answer=answer)
        return None

    def _ask(self, key: bytes, gold: str, candidate: Candidate) -> _Pending:
        item = {
            "gold": gold,
            "text": candidate.text,
            "boxed": candidate.boxed,
            "forbid_unevaluated": self._forbid_unevaluated,
        }
        return _Pending(key, candidate, self.pool.submit(item))

    def _finish(self, pending: _Pending) -> Checked:
        checked = pending.checked()
        if checked.verdict not in ("timeout", "error"):  # these may end otherwise another time
            self._memory.put(pending.key, checked)
        return checked


def _unusable(gold: str) -> Checked | None:
    """The failure that a known answer is, whatever the response."""
    if not gold:
        return Checked(verdict="error", reason="the known answer is empty")
    if len(gold) > LONGEST_KNOWN_ANSWER:
        reason = f"the known answer has more than {LONGEST_KNOWN_ANSWER} characters"
        return Checked(verdict="error", reason=reason)
    return None


def _last_word(text: str) -> str:
    return text.split()[-1].strip("$.") or text.split()[-1]


def _key(gold: str, candidate: Candidate) -> bytes:
    digest = blake2b(digest_size=16)
    digest.update(repr((gold, candidate.text, candidate.boxed)).encode("ascii", "backslashreplace"))
    return digest.digest()

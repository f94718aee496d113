"""Many responses at once, each against its known answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

from laurel.environments.math_answers.pool import CheckingPool, Question
from laurel.environments.math_answers.reading import (
    in_known_characters,
    is_unevaluated,
    read_answer,
    too_much_to_read,
)
from laurel.environments.math_answers.shortcuts import is_absurd, same_or_not
from laurel.environments.math_answers.verdicts import Candidate, Checked
from laurel.environments.memory import Memory

LONGEST_KNOWN_ANSWER = 10_000
_REMEMBERED = 50_000


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that a worker has, and how its verdict will be remembered."""

    key: bytes
    future: Future[Checked]


class AnswerChecker:
    """Checks mathematical answers. May be called from several threads at once."""

    def __init__(
        self, *, num_workers: int, timeout_seconds: float, forbid_unevaluated: bool = True
    ) -> None:
        """Start nothing yet.

        Args:
            num_workers: Processes that check what takes a parser.
            timeout_seconds: Limit of one answer in them.
            forbid_unevaluated: See `MathEnvironmentConfig.forbid_unevaluated`.
        """
        self.pool = CheckingPool(num_workers=num_workers, timeout_seconds=timeout_seconds)
        self._forbid_unevaluated = forbid_unevaluated
        self._memory: Memory[Checked] = Memory(_REMEMBERED)

    def check(self, responses: Sequence[str], golds: Sequence[str]) -> list[Checked]:
        """The verdict on each response, in order."""
        under_way: dict[bytes, Future[Checked]] = {}
        begun = [
            self._begin(response, gold, under_way)
            for response, gold in zip(responses, golds, strict=True)
        ]
        return [self._finish(one) if isinstance(one, _Pending) else one for one in begun]

    def check_gold(self, golds: Sequence[str]) -> list[Checked]:
        """The verdict of the parser on each known answer given as the answer, without shortcuts."""
        texts = [in_known_characters(gold).strip() for gold in golds]
        begun = [_unusable(text) or self._ask(text, Candidate(text=text)) for text in texts]
        return [one if isinstance(one, Checked) else one.result() for one in begun]

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.pool.close()

    def _begin(
        self, response: str, gold: str, under_way: dict[bytes, Future[Checked]]
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
            under_way[key] = self._ask(gold, candidate)
        return _Pending(key, under_way[key])

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

    def _ask(self, gold: str, candidate: Candidate) -> Future[Checked]:
        return self.pool.submit(
            Question(gold=gold, candidate=candidate, forbid_unevaluated=self._forbid_unevaluated)
        )

    def _finish(self, pending: _Pending) -> Checked:
        checked = pending.future.result()
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

"""Defines an environment that checks answers against known ones, in processes of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    Memory,
    RejectedTask,
    accuracy_metrics,
    mean_of,
    numbers,
    response_of,
    settings_of,
)
from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.answers import (
    Candidate,
    Checked,
    check_choice,
    in_known_characters,
    is_absurd,
    is_unevaluated,
    read_answer,
    same_or_not,
    too_much_to_read,
)
from laurel.extensions.math.settings import MathEnvironmentConfig
from laurel.protocols import MessageLog
from laurel.sandbox.limits import available_cores
from laurel.types import Task
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec


class MathEnvironment(EnvironmentInterface):
    """Gives the reward 1 for the right answer, and 0 for any other, in one turn.

    The answer is read from all assistant messages together, and the known answer is the task's
    `ground_truth`. If the known answer is missing or unreadable, the result is a failure, not 0.
    """

    def __init__(self, env_config: MathEnvironmentConfig | Mapping[str, Any]) -> None:
        """Set up a checker; its processes start with the first answer that needs one.

        Args:
            env_config: The settings, or a dictionary of them such as `{"num_workers": 2}`.

        Raises:
            ConfigError: Settings are unknown or invalid.
        """
        self.config = settings_of(MathEnvironmentConfig, env_config, where="env.math")
        self.spec = EnvironmentSpec(
            components=(), judges="completion", stop_strings=tuple(self.config.stop_strings or ())
        )
        self._checker = AnswerChecker(
            num_workers=self.config.num_workers,
            timeout_seconds=self.config.timeout_seconds,
            forbid_unevaluated=self.config.forbid_unevaluated,
        )

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[dict[str, Any] | None],
        return_extracted_answer: bool = True,
    ) -> EnvironmentReturn:
        """Check answers, and return metadata unchanged.

        With `return_extracted_answer=False`, an argument of NeMo RL's environment, the `answers`
        are None.
        """
        if len(message_log_batch) != len(metadata):
            raise EnvironmentFailedError(
                f"{len(message_log_batch)} conversations came with metadata for {len(metadata)}"
            )
        responses = [response_of(message_log) for message_log in message_log_batch]
        golds = [_known_answer(given) for given in metadata]
        verdicts = self._check(responses, golds)
        right = [checked.verdict == "correct" for checked in verdicts]
        words = ["correct" if one else "incorrect" for one in right]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: {one}"} for one in words
            ],
            metadata=list(metadata),
            next_stop_strings=[list(self.spec.stop_strings) or None for _ in verdicts],
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.ones(len(verdicts), dtype=torch.bool),
            answers=[one.answer for one in verdicts] if return_extracted_answer else None,
            failures=[one.reason for one in verdicts],
            # A finished batch does not say why a reward is zero.
            notes=[one.verdict for one in verdicts],
        )

    def _check(self, responses: list[str], golds: list[str | Checked]) -> list[Checked]:
        """Return the verdicts in order; for a missing known answer, `golds` holds the verdict."""
        known = [
            (r, gold) for r, gold in zip(responses, golds, strict=True) if isinstance(gold, str)
        ]
        if self.config.verifier_type == "math":
            checked = iter(
                self._checker.check([one for one, _ in known], [gold for _, gold in known])
            )
        else:
            multilingual = self.config.verifier_type == "multilingual_multichoice"
            checked = iter([check_choice(r, gold, multilingual=multilingual) for r, gold in known])
        return [next(checked) if isinstance(gold, str) else gold for gold in golds]

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute `accuracy`, `pass@...`, lengths and verdicts of a batch.

        A completion counts as correct if its reward is 1 and it was not truncated. `timeouts` and
        `unparseable` are the numbers of these verdicts, if the batch has `notes`.
        """
        figures, correct = accuracy_metrics(batch)
        lengths = numbers(batch["generation_lengths"])
        figures |= mean_of(
            "correct_solution_generation_lengths",
            [length for length, one in zip(lengths, correct, strict=True) if one],
        )
        if (notes := batch.get("notes")) is not None:
            counts = Counter(notes)
            figures["timeouts"] = float(counts["timeout"])
            figures["unparseable"] = float(counts["unparseable"])
        return batch, figures

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """Return the tasks whose known answer is unreadable, or is not accepted as an answer."""
        golds = [_known_answer(dict(task.metadata)) for task in tasks]
        readable = [gold for gold in golds if isinstance(gold, str)]
        if self.config.verifier_type == "math":
            checked = iter(self._checker.check_gold(readable))
        else:
            checked = iter(
                [check_choice("Answer: A", gold, multilingual=True) for gold in readable]
            )
        rejected = []
        for task, gold in zip(tasks, golds, strict=True):
            verdict = next(checked) if isinstance(gold, str) else gold
            reason = verdict.reason
            is_math = self.config.verifier_type == "math"
            if reason is None and is_math and verdict.verdict != "correct":
                why = {
                    "timeout": f"takes more than {self.config.timeout_seconds:g} s to be read",
                    "unparseable": "cannot be read",
                }.get(verdict.verdict, "is not accepted as its own answer")
                reason = f"the known answer {str(gold)!r} {why}"
            if reason is not None:
                rejected.append(RejectedTask(task=task, reason=reason))
        return rejected

    def shutdown(self) -> None:
        """End the checking processes; running checks fail."""
        self._checker.close()


def _known_answer(metadata: Mapping[str, Any] | None) -> str | Checked:
    gold = (metadata or {}).get("ground_truth")
    if isinstance(gold, str):
        return gold
    if isinstance(gold, int | float) and not isinstance(gold, bool):
        return str(gold)
    problem = "is missing" if gold is None else f"is {type(gold).__name__}, not text or a number"
    return Checked(verdict="error", reason=f"the task's ground_truth {problem}")


LONGEST_KNOWN_ANSWER = 10_000
MEMORY_LIMIT = 2 << 30
"""The limit of a checking process's address space, in bytes."""
ITEMS_OF_A_LIFE = 2_000
"""The number of answers after which a process is replaced, because its caches only grow."""
_REMEMBERED = 50_000
# Processes need these to find Python and libraries, but no keys or tokens of the trainer.
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
# Python integers, because long computations of gmpy2 cannot be interrupted.
_OWN_VARIABLES = {
    "SYMPY_GROUND_TYPES": "python",
    "MALLOC_ARENA_MAX": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that a process is checking, and the key of its verdict in the cache."""

    key: bytes
    candidate: Candidate
    future: Future[Any]

    def checked(self) -> Checked:
        """Wait for the verdict, and return it."""
        shown = self.candidate.text if self.candidate.boxed else None
        try:
            return Checked(**self.future.result())
        except TimeoutError:
            return Checked(verdict="timeout", answer=shown)
        except ProcessDiedError:
            reason = "the checking process died twice on this answer"
            return Checked(verdict="error", answer=shown, reason=reason)


class AnswerChecker:
    """Checks mathematical answers; thread-safe."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_seconds: float,
        forbid_unevaluated: bool = True,
        items_of_a_life: int = ITEMS_OF_A_LIFE,
    ) -> None:
        """Set up a checker without starting processes.

        Args:
            num_workers: The number of processes for answers that require a parser; at most one per
                available core.
            timeout_seconds: The time limit of one answer in these processes.
            forbid_unevaluated: Whether an unevaluated expression is wrong if the known answer is a
                value, as in `MathEnvironmentConfig.forbid_unevaluated`.
            items_of_a_life: The number of answers after which a process is replaced.
        """
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self.pool = ProcessPool(
            ProcessPoolSpec(
                name="the checker of answers",
                prepare="laurel.extensions.math.comparison:prepare",
                num_workers=min(num_workers, available_cores()),
                timeout_seconds=timeout_seconds,
                attempts=2,  # another process may have killed it
                items_of_a_life=items_of_a_life,
                memory_limit=MEMORY_LIMIT,
                environment=kept | _OWN_VARIABLES,
            )
        )
        self._forbid_unevaluated = forbid_unevaluated
        self._memory: Memory[Checked] = Memory(_REMEMBERED)

    def check(self, responses: Sequence[str], golds: Sequence[str]) -> list[Checked]:
        """Return the verdict on each response, in order."""
        under_way: dict[bytes, _Pending] = {}
        begun = [
            self._begin(response, gold, under_way)
            for response, gold in zip(responses, golds, strict=True)
        ]
        checked = []
        for one in begun:
            if isinstance(one, _Pending):
                pending, one = one, one.checked()
                if one.verdict not in ("timeout", "error"):  # another attempt may end differently
                    self._memory.put(pending.key, one)
            checked.append(one)
        return checked

    def check_gold(self, golds: Sequence[str]) -> list[Checked]:
        """Return the parser's verdict on each known answer as an answer to itself."""
        texts = [in_known_characters(gold).strip() for gold in golds]
        begun = {
            text: _unusable(text) or self._ask(b"", text, Candidate(text=text))
            for text in dict.fromkeys(texts)
        }
        checked = {
            text: one if isinstance(one, Checked) else one.checked() for text, one in begun.items()
        }
        return [checked[text] for text in texts]

    def close(self) -> None:
        """End the processes; further calls do nothing."""
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
        digest = blake2b(digest_size=16)
        facts = repr((gold, candidate.text, candidate.boxed))
        digest.update(facts.encode("ascii", "backslashreplace"))
        key = digest.digest()
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
            last = candidate.text.split()[-1]
            text = answer if answer is not None else last.strip("$.") or last
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


def _unusable(gold: str) -> Checked | None:
    # Such a known answer is a failure whatever the response.
    if not gold:
        return Checked(verdict="error", reason="the known answer is empty")
    if len(gold) > LONGEST_KNOWN_ANSWER:
        reason = f"the known answer has more than {LONGEST_KNOWN_ANSWER} characters"
        return Checked(verdict="error", reason=reason)
    return None

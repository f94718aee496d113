"""Defines an environment that runs programs, either to score them by tests, or as a tool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from typing import Any

import torch

from laurel.environments.interface import (
    ENVIRONMENT_ROLE,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    RejectedTask,
    accuracy_metrics,
    last_answer,
    mean_of,
    settings_of,
)
from laurel.errors import EnvironmentFailedError
from laurel.extensions.code.answers import (
    Session,
    join_code,
    observation,
    program_of,
    tagged,
)
from laurel.extensions.code.nodes import NodePool
from laurel.extensions.code.opening import open_pool, program_limits
from laurel.extensions.code.sandbox.detection import Detection, detect
from laurel.extensions.code.sandbox.jobs import SandboxResult
from laurel.extensions.code.sandbox.pool import ProgramPool
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import CodeEnvironmentConfig
from laurel.extensions.code.tests import (
    NO_CODE,
    CodeVerdict,
    MalformedTaskError,
    TaskTests,
    has_tests,
    program_verdict,
    read_tests,
)
from laurel.protocols import MessageLog
from laurel.types import Task
from laurel.workers.reservations import ClusterNodes

_ALL = 1.0 - 1e-6  # rewards of several attempts are added up in float32


class CodeEnvironment(EnvironmentInterface):
    """Runs the policy's programs in a sandbox, with or without tests in the task's metadata.

    **With tests** (`test_code`, `test_list`, `stdio_tests` or `call_tests`) the policy's last
    message is a program, which `program_of` reads, and the tests give the reward. A program that
    does not run also has a verdict and a reward; an error of the sandbox is a failure.

    =================  ==========================================================================
    `test_code`        code that ends without an exception if the function `entry` is right
    `test_list`        texts of code, each of which is a test, such as MBPP's asserts
    `stdio_tests`      objects with `stdin` and `stdout`
    `call_tests`       objects with `args`, `kwargs` and `expected`, for the function `entry`
    `test_setup`       code before `test_code`, with what both need; or before each of `test_list`,
                       where it may use the names of the program
    `code_prefix`      code that a completion may continue, such as the head of the function
    `test_weights`     the weight of each test, for `reward: weighted`
    `comparison`       the grader whose rules compare output or values: `laurel`, `apps`, `taco`,
                       `livecodebench`, `verl`
    `prelude`          code that runs before the program, in its namespace, such as the usual
                       imports; for `stdio_tests` and `call_tests`
    =================  ==========================================================================

    **Without tests**, `<code>...</code>` in the last message is run, and answered by
    `<result>...</result>` with its output, and the value of its last statement. Variables are kept
    between turns, as `code.answers` describes. The reward is 0, because another environment scores
    the answer, in a composite that this one conducts. A message without code gets no result, or is
    the answer (`terminate_without_code`).
    """

    def __init__(
        self,
        env_config: CodeEnvironmentConfig | Mapping[str, Any],
        *,
        detection: Detection | None = None,
        nodes: ClusterNodes | None = None,
        timeout_seconds: float = 600.0,
        max_observation_chars: int = 4096,
    ) -> None:
        """Find out how well programs can be isolated; processes start with the first program.

        Args:
            env_config: The settings, or a dictionary of them such as `{"num_workers": 2}`.
            detection: The isolation that this machine supports; detected once by default.
            nodes: The cluster nodes that run programs, each with its own detection; None for this
                machine.
            timeout_seconds: The time after which a whole call fails. Programs that have not begun
                before are failures, and those that have are verdicts.
            max_observation_chars: Longest result that the policy sees; a longer one loses its
                middle.

        Raises:
            ConfigError: Settings are unknown or invalid; or this machine, or a node, isolates
                programs less than they require.
        """
        self.config = settings_of(CodeEnvironmentConfig, env_config, where="env.code")
        self.spec = EnvironmentSpec(
            components=(), judges="completion", stop_strings=tuple(self.config.stop_strings or ())
        )
        self._limits = program_limits(self.config.sandbox)
        self._most_chars = max_observation_chars
        sandbox, workers = self.config.sandbox, self.config.num_workers
        self._pool: ProgramPool = (
            open_pool(sandbox, num_workers=workers, detection=detection or _detected())
            if nodes is None or nodes.is_only_this()
            else NodePool(sandbox, nodes, num_workers=workers)
        )
        self._seconds_to_begin = 0.9 * timeout_seconds

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Run the programs of conversations, and score those of tasks with tests.

        The returned metadata also has the `tier`. With tests, it has the `verdict`, the share of
        passed tests (`passed_share`), the number of `attempts`, and their reward so far
        (`attempts_reward`), which is subtracted from that of the next attempt. Without tests, it
        has the blocks so far (`code_session`).
        """
        if len(message_log_batch) != len(metadata):
            raise EnvironmentFailedError(
                f"{len(message_log_batch)} conversations came with metadata for {len(metadata)}"
            )
        deadline = time.monotonic() + self._seconds_to_begin
        begun = [
            self._begin(last_answer(message_log), dict(given or {}), deadline, len(metadata))
            for message_log, given in zip(message_log_batch, metadata, strict=True)
        ]
        answers = [finish() for finish in begun]
        return EnvironmentReturn(
            observations=[{"role": one.role, "content": one.content} for one in answers],
            metadata=[one.metadata for one in answers],
            next_stop_strings=[list(self.spec.stop_strings) or None for _ in answers],
            rewards=torch.tensor([one.reward for one in answers], dtype=torch.float32),
            terminateds=torch.tensor([one.is_over for one in answers], dtype=torch.bool),
            answers=[one.answer for one in answers],
            failures=[one.failure for one in answers],
            # A finished batch does not say how its rewards came about.
            notes=[one.note for one in answers],
        )

    def _begin(
        self, text: str, given: dict[str, Any], deadline: float, batch: int
    ) -> Callable[[], _Answer]:
        """Start the program of one message; the returned function waits for its result."""
        given["tier"] = self._pool.tier.value
        try:
            if has_tests(given):
                tests = read_tests(given, self.config)
                attempts = given.get("attempts", 0)
                if not isinstance(attempts, int) or isinstance(attempts, bool):
                    raise MalformedTaskError(f"attempts is {attempts!r}, not a number")
                code = program_of(text, entry=tests.entry, prefix=tests.prefix)
                verdict = self._judge(tests, code, deadline, batch)
                return lambda: self._scored(verdict(), given, attempts + 1)
            session = Session.of(given.get("code_session"))
            return self._run(text, session, given, deadline, batch)
        except (MalformedTaskError, ValueError) as error:
            return partial(_Answer, metadata=given, failure=str(error), is_over=True)

    def _judge(
        self, tests: TaskTests, code: str | None, deadline: float | None, batch: int = 1
    ) -> Callable[[], CodeVerdict]:
        """Start the job of a program; the returned function waits for the verdict."""
        if code is None:
            return lambda: CodeVerdict(status=NO_CODE, hint="there is no program in it")
        one_by_one = self.config.reward != "all_or_nothing"
        job = tests.job(
            code,
            self._limits,
            one_by_one=one_by_one,
            total_s=self.config.sandbox.seconds_of_all_tests,
        )
        future = self._pool.submit(job, deadline=deadline, batch=batch)
        most, reward = self._most_chars, self.config.reward
        return lambda: program_verdict(tests, code, future.result(), reward, most=most)

    def _scored(self, verdict: CodeVerdict, given: dict[str, Any], attempt: int) -> _Answer:
        if verdict.failure is not None:
            return _Answer(metadata=given, failure=verdict.failure, is_over=True)
        is_over = verdict.is_right or attempt >= self.config.max_attempts
        before = given.get("attempts_reward", 0.0)
        content = f"Environment: {verdict.status}"
        if not is_over and verdict.hint:
            content += f"\n{verdict.hint}".encode("utf-8", "replace").decode()
        return _Answer(
            # The policy's turn has ended: the hint for the next attempt is a turn of its own.
            role=ENVIRONMENT_ROLE if is_over else "user",
            content=content,
            metadata=given
            | {
                "verdict": verdict.status,
                "passed_share": verdict.passed_share,
                "attempts": attempt,
                "attempts_reward": verdict.reward,
            },
            reward=verdict.reward - before,
            is_over=is_over,
            answer=verdict.status,
            note={
                "verdict": verdict.status,
                "passed_share": verdict.passed_share,
                "attempts": attempt,
            },
        )

    def _run(
        self, text: str, session: Session, given: dict[str, Any], deadline: float, batch: int
    ) -> Callable[[], _Answer]:
        """Start a block of code; the returned function waits for its result."""
        found = tagged(text)
        if found is None:
            note = {"calls": session.num_calls, "errors": session.num_errors}
            is_over = self.config.terminate_without_code
            return partial(_Answer, metadata=given, note=note, is_over=is_over)
        code, after = found
        job = session.job(code, limits=self._limits, most=self._most_chars)
        future = self._pool.submit(job, deadline=deadline, batch=batch)
        return lambda: self._ran(session, code, after, given, future)

    def _ran(
        self,
        session: Session,
        code: str,
        after: str,
        given: dict[str, Any],
        future: Future[SandboxResult],
    ) -> _Answer:
        result = future.result()
        if not result.status.is_verdict:
            reason = f"the sandbox failed: {result.reason}"
            return _Answer(metadata=given, failure=reason, is_over=True)
        session, reply = session.after(code, result, self._limits)
        return _Answer(
            content=observation(reply, code, after, most=self._most_chars),
            metadata=given | {"code_session": session.as_metadata()},
            is_over=self.config.terminate_on_evaluation and reply.value is not None,
            answer=reply.value or None,
            note={"calls": session.num_calls, "errors": session.num_errors},
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute `accuracy`, `pass@...`, verdicts and calls of a batch.

        A completion counts as correct if its reward is 1 and it was not truncated. Over completions
        of tasks with tests, there are the share of each verdict (`verdict/<status>`, including
        `no_code` and `no_function`), the share of passed tests, and the number of attempts. Over
        the others, there are the number of blocks that ran, and the share that raised. Both need a
        batch with `notes`. `sandbox_failures` is the number of completions without a reward;
        `tier_is_full` is 1 if programs have Laurel's full isolation.
        """
        figures, _ = accuracy_metrics(batch, right=_ALL)
        noted = [note or {} for note in batch.get("notes") or ()]
        scored = [note for note in noted if "verdict" in note]
        for status, count in Counter(note["verdict"] for note in scored).items():
            figures[f"verdict/{status}"] = count / len(scored)
        figures |= mean_of("tests_passed_share", [note["passed_share"] for note in scored])
        figures |= mean_of("attempts", [float(note["attempts"]) for note in scored])
        called = [note for note in noted if "calls" in note]
        num_calls = sum(note["calls"] for note in called)
        figures |= mean_of("code_calls", [float(note["calls"]) for note in called])
        if num_calls:
            figures["code_error_share"] = sum(note["errors"] for note in called) / num_calls
        figures["sandbox_failures"] = float(batch.get("num_failures", 0))
        figures["tier_is_full"] = float(self._pool.tier is Tier.FULL)
        return batch, figures

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """List tasks whose tests cannot be run, or whose own `reference_solution` fails them.

        Tasks with the same tests and the same solution have one run.
        """
        begun: dict[bytes, Callable[[], str | None]] = {}
        checks = [self._check(dict(task.metadata), begun) for task in tasks]
        reasons = [check() for check in checks]
        return [
            RejectedTask(task=task, reason=reason)
            for task, reason in zip(tasks, reasons, strict=True)
            if reason is not None
        ]

    def _check(
        self, metadata: dict[str, Any], begun: dict[bytes, Callable[[], str | None]]
    ) -> Callable[[], str | None]:
        if not has_tests(metadata):
            return lambda: None
        try:
            tests = read_tests(metadata, self.config)
        except MalformedTaskError as error:
            reason = str(error)
            return lambda: reason
        if tests.reference is None:
            return lambda: None
        # Of the text of all its fields, as expected values may be lists.
        key = blake2b(repr(tests).encode("utf-8", "surrogatepass")).digest()
        if key in begun:
            return begun[key]
        code = join_code(tests.reference, entry=tests.entry, prefix=tests.prefix)
        verdict_of = self._judge(tests, code, None)

        def reason_of() -> str | None:
            verdict = verdict_of()
            if verdict.is_right or verdict.failure is not None:  # the task is not at fault
                return None
            return f"its reference_solution fails its tests: {verdict.hint}"[:300]

        begun[key] = reason_of
        return reason_of

    def shutdown(self) -> None:
        """End the processes that run programs; running programs fail."""
        self._pool.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The answer to one conversation; by default nothing happened."""

    metadata: dict[str, Any]
    role: str = ENVIRONMENT_ROLE
    content: str = ""
    reward: float = 0.0
    is_over: bool = False
    answer: str | None = None
    failure: str | None = None
    note: dict[str, Any] = field(default_factory=dict)


@cache
def _detected() -> Detection:
    return detect()  # takes a few seconds, so once in a process

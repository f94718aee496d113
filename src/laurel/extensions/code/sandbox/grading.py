"""Grades programs by how their processes ended; expected values are never passed on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laurel.extensions.code.sandbox.comparison import (
    same_output,
    same_output_as,
    same_value,
    same_value_as,
)
from laurel.extensions.code.sandbox.inside import plain_data
from laurel.extensions.code.sandbox.inside.calls import EXIT_CODES
from laurel.extensions.code.sandbox.jobs import (
    CallTest,
    Limits,
    SandboxJob,
    SandboxResult,
    Status,
    TestResult,
)
from laurel.extensions.code.sandbox.zygote_process import BoundedZygote, ProcessOutcome

_SIGKILL, _SIGXCPU, _SIGXFSZ, _SIGSYS = 9, 24, 25, 31
_STATUS_OF_EXIT_CODE = {code: Status(name) for name, code in EXIT_CODES.items()}
_STATUS_OF_SIGNAL = {
    _SIGXCPU: Status.TIMEOUT_CPU,
    _SIGXFSZ: Status.DISK_LIMIT,
    _SIGSYS: Status.FORBIDDEN,
}
_DETAIL = 300
_KEPT = 64 << 10
_TOTAL_IS_SPENT = "the time of all tests together was spent"


@dataclass(frozen=True, slots=True)
class _Graded:
    """A grade: a status, the results of tests, and the processes that they are based on."""

    status: Status
    tests: tuple[TestResult, ...]
    outcomes: Sequence[ProcessOutcome]
    # The process whose output is shown: of the first failed test, otherwise of the last one.
    shown: ProcessOutcome


def grade(job: SandboxJob, runner: BoundedZygote, *, tier: str, attempt: int) -> SandboxResult:
    """Run a job and grade it.

    Args:
        tier: The letter of its tier.
        attempt: The number of attempts, including this one.

    Raises:
        SandboxLostError: The sandbox failed, and not the program.
        SandboxStartError: The sandbox does not start.
    """
    graders = {"script": _script, "stdio": _stdio, "call": _call, "tests": _tests}
    graded = graders[job.mode](job, runner)
    shown = graded.shown
    times = [outcome.cpu_s for outcome in graded.outcomes]
    # All results of a batch are held at once, and graded output is not needed any more.
    kept = shown.stdout if job.mode == "script" else shown.stdout[:_KEPT]
    return SandboxResult(
        id=job.id,
        status=graded.status,
        tests=graded.tests,
        stdout=kept.decode("utf-8", "replace"),
        stderr=shown.stderr.decode("utf-8", "replace"),
        stdout_truncated="stdout" in shown.truncated or len(kept) < len(shown.stdout),
        stderr_truncated="stderr" in shown.truncated,
        exit_code=shown.exit_code,
        signal=shown.signal,
        cpu_s=None if None in times else sum(time for time in times if time is not None),
        wall_s=sum(outcome.wall_s for outcome in graded.outcomes),
        max_rss_kb=max(outcome.max_rss_kb for outcome in graded.outcomes),
        tier=tier,
        attempt=attempt,
    )


def status_of(outcome: ProcessOutcome, limits: Limits) -> Status:
    """Return the status that follows from how a process ended, without its output."""
    if outcome.ended_by == "wall":
        return Status.TIMEOUT_WALL
    if outcome.ended_by == "memory":
        return Status.MEMORY_LIMIT
    if outcome.ended_by == "disk":
        return Status.DISK_LIMIT
    if outcome.ended_by in ("stdout", "stderr", "result") or outcome.truncated:
        return Status.OUTPUT_LIMIT
    if outcome.signal is not None:
        spent = outcome.cpu_s is not None and outcome.cpu_s >= limits.cpu_s
        if outcome.signal == _SIGKILL and spent:
            return Status.TIMEOUT_CPU
        return _STATUS_OF_SIGNAL.get(outcome.signal, Status.KILLED)
    if outcome.exit_code is None:
        return Status.KILLED
    if outcome.exit_code == 0:
        late = outcome.cpu_s is not None and outcome.cpu_s > limits.cpu_s
        return Status.TIMEOUT_CPU if late else Status.OK
    return _STATUS_OF_EXIT_CODE.get(outcome.exit_code, Status.RUNTIME_ERROR)


def _script(job: SandboxJob, runner: BoundedZygote) -> _Graded:
    outcome = _run_script(job, runner, job.stdin, job.limits)
    return _Graded(status_of(outcome, job.limits), (), [outcome], outcome)


def _stdio(job: SandboxJob, runner: BoundedZygote) -> _Graded:
    def run(test: Any, limits: Limits) -> tuple[TestResult, list[ProcessOutcome]]:
        outcome = _run_script(job, runner, test.stdin, limits)
        status = status_of(outcome, limits)
        if status is Status.OK:
            given = outcome.stdout.decode("utf-8", "replace")
            if job.comparison == "laurel":
                same = same_output(test.stdout, given, float_tolerance=job.float_tolerance)
            else:
                same = same_output_as(job.comparison, test.stdout, given)
            if not same:
                status = Status.WRONG_ANSWER
        return TestResult(status=status), [outcome]

    return _one_by_one(job, job.tests, run)


def _one_by_one(
    job: SandboxJob,
    tests: Sequence[Any],
    run: Callable[[Any, Limits], tuple[TestResult, list[ProcessOutcome]]],
) -> _Graded:
    """Grade by tests that each have a process, within the total time limit of the job."""
    results: list[TestResult] = []
    outcomes: list[ProcessOutcome] = []
    shown: ProcessOutcome | None = None
    began = time.monotonic()
    for test in tests:
        limits = job.limits
        if job.total_s is not None:
            left = job.total_s - (time.monotonic() - began)
            if left <= 0:
                results.append(TestResult(status=Status.TIMEOUT_WALL, detail=_TOTAL_IS_SPENT))
                break
            limits = replace(limits, wall_s=min(limits.wall_s, left))
        result, ended = run(test, limits)
        results.append(result)
        outcomes += ended
        if shown is None and result.status is not Status.OK:
            shown = ended[-1]
        if result.status is Status.SYNTAX_ERROR or (
            job.stop_at_failure and result.status is not Status.OK
        ):
            break
    # Tests after a syntax error, or after the time limit, have the status of the last one.
    last = results[-1]
    for_all = last.status is Status.SYNTAX_ERROR or last.detail == _TOTAL_IS_SPENT
    rest = last if for_all else TestResult(status=Status.NOT_RUN)
    results += [rest] * (len(tests) - len(results))
    return _Graded(_overall(results), tuple(results), outcomes, shown or outcomes[-1])


def _run_script(
    job: SandboxJob, runner: BoundedZygote, stdin: str, limits: Limits
) -> ProcessOutcome:
    header = {"kind": "script", "prelude": job.prelude}
    return runner.one(header, _bytes(job.code), limits=limits, stdin=_bytes(stdin))


def _overall(results: Sequence[TestResult]) -> Status:
    """Return the status of the first test that did not pass."""
    return next((one.status for one in results if one.status is not Status.OK), Status.OK)


def _call(job: SandboxJob, runner: BoundedZygote) -> _Graded:
    tests = [test for test in job.tests if isinstance(test, CallTest)]
    calls = plain_data.dumps([(list(test.args), dict(test.kwargs)) for test in tests])
    header = {"kind": "call", "entry": job.entry, "prelude": job.prelude}
    outcome = runner.one(header, _bytes(job.code), calls, limits=job.limits)
    ended = status_of(outcome, job.limits)
    # What a program sends counts only if it ended properly afterwards.
    lines = outcome.result.split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    forged = (rest and ended is Status.OK) or len(complete) > len(tests)
    results = []
    for index, test in enumerate(tests):
        if forged:
            results.append(TestResult(status=Status.BAD_RESULT, detail="more values than calls"))
        elif index < len(complete):
            results.append(_grade_line(complete[index], index, test, job))
        else:
            missing = Status.NO_RESULT if ended is Status.OK else ended
            results.append(TestResult(status=missing, detail="it gave no value"))
    if not forged and ended is not Status.OK and len(complete) == len(tests):
        # It answered everything, and then did not end as the sandbox would have ended it.
        results[-1] = TestResult(status=ended)
    return _Graded(_overall(results), tuple(results), [outcome], outcome)


def _grade_line(line: bytes, index: int, test: CallTest, job: SandboxJob) -> TestResult:
    try:
        reply = json.loads(line)
        if type(reply) is not dict or reply.get("i") != index:
            return TestResult(status=Status.BAD_RESULT, detail="a value out of order")
        if "error" in reply:
            detail = f"{reply['error']}: {reply.get('text', '')}"[:_DETAIL]
            return TestResult(status=_status_named(reply.get("kind")), detail=detail)
        if "bad" in reply:
            return TestResult(status=Status.BAD_RESULT, detail=str(reply["bad"])[:_DETAIL])
        given = plain_data.loads(json.dumps(reply["value"]).encode())
        if job.comparison != "laurel":
            same = same_value_as(job.comparison, test.expected, given)
        else:
            same = same_value(
                test.expected,
                given,
                strict_types=job.strict_types,
                float_tolerance=job.float_tolerance,
            )
    except Exception as error:  # the program may have sent anything
        return TestResult(status=Status.BAD_RESULT, detail=f"{type(error).__name__} in its value")
    return TestResult(status=Status.OK if same else Status.WRONG_ANSWER)


def _status_named(name: Any) -> Status:
    """Return the status of a failure by its name; a name from the program never gives OK."""
    known = {status.value: status for status in _STATUS_OF_EXIT_CODE.values()}
    return known.get(name, Status.RUNTIME_ERROR) if isinstance(name, str) else Status.BAD_RESULT


def _tests(job: SandboxJob, runner: BoundedZygote) -> _Graded:
    """Grade by tests that run in another sandbox than the program.

    The end of the program's process only explains why the tests got no answer.
    """
    header = {"kind": "tests", "entry": job.entry, "reply_kb": job.limits.result_kb}

    def run(test_code: str, limits: Limits) -> tuple[TestResult, list[ProcessOutcome]]:
        parts = (_bytes(test_code), _bytes(job.test_setup))
        verdict, outcome = runner.pair(
            _bytes(job.code),
            header,
            *parts,
            limits=limits,
            is_waiting=lambda verdict: lacked_answer(verdict, limits),
        )
        report = _test_report(verdict, limits)
        status, detail = _grade_tests(report, verdict, outcome, limits)
        return TestResult(status=status, detail=detail), [verdict, outcome]

    return _one_by_one(job, job.tests or (job.test_code,), run)


def lacked_answer(verdict: ProcessOutcome, limits: Limits) -> bool:
    """Report whether tests ended because the program ended before it answered."""
    return bool(_test_report(verdict, limits).get("why") == "gone")


def _test_report(verdict: ProcessOutcome, limits: Limits) -> dict[str, Any]:
    """Return the report of the process that ran the tests, which is trusted like the tests."""
    ended = status_of(verdict, limits)
    lines = verdict.result.splitlines()
    if len(lines) == 1 and ended in (Status.OK, Status.RUNTIME_ERROR):
        report: dict[str, Any] = json.loads(lines[0])
        if report["passed"] == (ended is Status.OK):
            return report
    return {"passed": False, "why": "ended", "detail": f"the tests ended with {ended.value}"}


def _grade_tests(
    report: dict[str, Any], verdict: ProcessOutcome, outcome: ProcessOutcome, limits: Limits
) -> tuple[Status, str]:
    detail = str(report.get("detail", ""))
    if report["passed"]:
        # A right answer with too much output, or too much time, does not pass.
        ended = status_of(outcome, limits) if outcome.ended_by != "cancel" else Status.OK
        return ended, ""
    if report["why"] == "gone":
        ended = status_of(outcome, limits)
        return (Status.NO_RESULT if ended is Status.OK else ended), "it ended before it answered"
    if report["why"] == "bad":
        return Status.BAD_RESULT, detail
    if report["why"] == "ended":
        ended = status_of(verdict, limits)
        waited = ended is Status.TIMEOUT_WALL
        return (ended if waited else Status.WRONG_ANSWER), detail
    if report["why"] == "wrong":
        return Status.WRONG_ANSWER, detail
    return _status_named(report["why"]), detail


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

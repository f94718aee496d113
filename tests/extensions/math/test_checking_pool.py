"""Processes that check answers: killed in time, killed by others, gone with their owner."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.answers import Candidate
from laurel.extensions.math.environment import AnswerChecker
from laurel.sandbox.limits import available_cores
from sandbox_processes import END, is_gone, wait_until

HANG = r"9^{9^{9}}"
"""math-verify computes it until it is killed."""
LIMIT = 3.0
"""Seconds for an answer that takes milliseconds, on a machine that is busy with other things."""


def asked(checker, text, gold="4", boxed=True):
    """What comes of the parser, without the ways around it."""
    return checker._ask(b"", gold, Candidate(text=text, boxed=boxed))


def answered(pending):
    pending.future.exception(END)
    return pending.checked()


def verdict_of(checker, text, gold="4"):
    return answered(asked(checker, text, gold)).verdict


def wait_until_busy(pid):
    """Until it has used more time than its self-test takes: it must have its question."""
    wait_until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) > 0.3)


@pytest.fixture(scope="module")
def checker():
    checker = AnswerChecker(num_workers=2, timeout_seconds=LIMIT)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("SOME_TOKEN", "secret")
        yield checker
    checker.close()


def test_verdicts(checker):
    assert verdict_of(checker, r"\sqrt{16}") == "correct"
    assert verdict_of(checker, r"\sqrt{15}") == "incorrect"
    checked = answered(asked(checker, "I think it is $4$.", boxed=False))
    assert (checked.verdict, checked.answer) == ("correct", "4")
    none = answered(asked(checker, "I do not know.", boxed=False))
    assert (none.verdict, none.answer) == ("unparseable", None)


def test_unevaluated_answers_are_a_matter_of_choice(checker):
    text, gold = r"\int_0^1 2x\,dx", "1"
    assert verdict_of(checker, text, gold) == "incorrect"
    assert verdict_of(checker, text, text) == "correct"
    lenient = AnswerChecker(num_workers=1, timeout_seconds=END, forbid_unevaluated=False)
    lenient.pool = checker.pool
    assert verdict_of(lenient, text, gold) == "correct"


@pytest.mark.slow
def test_d16_an_endless_answer_ends_at_its_limit_and_harms_no_neighbour(checker):
    verdict_of(checker, r"\sqrt{16}")  # so that no start is measured
    texts = [HANG if i % 10 == 5 else rf"\sqrt{{{i * i}}}" for i in range(20)]
    begun = time.monotonic()
    futures = [asked(checker, text, str(i)) for i, text in enumerate(texts)]
    verdicts = [answered(future).verdict for future in futures]
    assert verdicts == ["timeout" if text == HANG else "correct" for text in texts]
    assert time.monotonic() - begun < END


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_is_replaced_and_its_answer_checked_again():
    with closing(AnswerChecker(num_workers=1, timeout_seconds=LIMIT)) as checker:
        verdict_of(checker, r"\sqrt{16}")
        (worker,) = checker.pool.process_ids()[1:]
        future = asked(checker, HANG)
        wait_until_busy(worker)
        os.kill(worker, signal.SIGKILL)
        # Again it takes for ever, in a second process.
        assert answered(future).verdict == "timeout"
        assert verdict_of(checker, r"\sqrt{16}") == "correct"
        assert is_gone(worker)


@pytest.mark.slow
def test_an_answer_that_kills_two_processes_is_an_error_not_a_zero():
    with closing(AnswerChecker(num_workers=1, timeout_seconds=END)) as checker:
        verdict_of(checker, r"\sqrt{16}")
        future = asked(checker, HANG)
        killed = set()
        while len(killed) < 2:
            for worker in set(checker.pool.process_ids()[1:]) - killed:
                wait_until_busy(worker)
                os.kill(worker, signal.SIGKILL)
                killed.add(worker)
            time.sleep(0.01)
        checked = answered(future)
        assert checked.verdict == "error"
        assert "died" in checked.reason
        assert verdict_of(checker, r"\sqrt{16}") == "correct"


def test_processes_have_little_memory_and_know_no_secret_of_ours(checker):
    verdict_of(checker, r"\sqrt{16}")
    zygote, *workers = checker.pool.process_ids()
    assert os.environ["SOME_TOKEN"] == "secret"
    for pid in (zygote, *workers):
        assert b"SOME_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
    for pid in workers:
        limits = Path(f"/proc/{pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
        assert line.split()[3] == str(2 << 30)


def test_at_most_one_process_per_core():
    checker = AnswerChecker(num_workers=1_000, timeout_seconds=3.0)
    assert checker.pool.num_workers == available_cores()
    assert checker.pool.process_ids() == []
    checker.close()


@pytest.mark.slow
def test_an_alarm_of_the_caller_survives():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    checker = AnswerChecker(num_workers=1, timeout_seconds=1.0)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        answers = [r"\boxed{\sqrt{16}}", rf"\boxed{{x {HANG}}}"]
        checker.check(answers, ["4", "4"])
        wait_until(lambda: rung)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        checker.close()


def test_a_checker_that_lies_is_refused(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "ExprExtractionConfig = LatexExtractionConfig = lambda: None\n"
        "def parse(text, *_, **__): return [text]\n"
        "def verify(*_, **__): return False\n"
    )
    complaint = r"wrong verdicts on known answers.*4 for 4: incorrect"
    monkeypatch.syspath_prepend(tmp_path)  # the zygote looks where this process does
    with closing(AnswerChecker(num_workers=1, timeout_seconds=1.0)) as checker:
        for _ in range(2):
            with pytest.raises(EnvironmentFailedError, match=complaint):
                answered(asked(checker, "4"))
        assert checker.pool.process_ids() == []


@pytest.fixture
def fresh():
    checker = AnswerChecker(num_workers=2, timeout_seconds=LIMIT)
    yield checker
    checker.close()


def test_shortcuts_start_no_process(fresh):
    boxed = [r"\boxed{42}", r"\boxed{\frac12}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\int_0^1 x}", ""]
    found = [one.verdict for one in fresh.check(boxed, ["42", "0.5", "4", "0.5", "4"])]
    assert found == ["correct", "correct", "incorrect", "incorrect", "unparseable"]
    assert fresh.pool.process_ids() == []


@pytest.mark.slow
def test_equal_answers_are_checked_once_and_remembered_but_no_timeout(fresh):
    found = fresh.check([r"\boxed{\sqrt{16}}"] * 64, ["4"] * 64)
    assert {one.verdict for one in found} == {"correct"}
    late = r"\boxed{\binom{1000000000}{500000000}}"
    (first,) = fresh.check([late], ["4"])
    assert first.verdict == "timeout"
    fresh.pool.close()  # whatever is asked now comes from memory
    (again,) = fresh.check([r"so \boxed{\sqrt{16}}"], ["4"])
    assert again == found[0]
    with pytest.raises(EnvironmentFailedError):
        fresh.check([late], ["4"])


@pytest.mark.parametrize("gold", ["", "  ", "x" * 10_001])
def test_a_known_answer_that_cannot_be_used_is_an_error(fresh, gold):
    (checked,) = fresh.check([r"\boxed{4}"], [gold])
    assert checked.verdict == "error"
    assert checked.reason


@pytest.mark.parametrize("text", ["\ud800", "\x00", "a\ud83d", "\\boxed{\ud800+1}", "☃" * 3_000])
def test_odd_characters_do_no_harm(checker, text):
    first, second = checker.check([text, r"\boxed{\sqrt{16}}"], ["4", "4"])
    assert first.verdict in ("incorrect", "unparseable")
    assert second.verdict == "correct"

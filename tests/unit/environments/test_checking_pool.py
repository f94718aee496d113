"""Processes that check answers: killed in time, killed by others, gone with their owner."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from laurel.environments.math.answers import Candidate
from laurel.environments.math.pool import AnswerChecker, CheckingPool, CheckRequest
from laurel.errors import EnvironmentFailedError
from laurel.sandbox.limits import available_cores

HANG = r"9^{9^{9}}"
"""math-verify computes it until it is killed."""
BATCH_LIMIT = 60.0
"""Seconds in which everything here ends even on a machine that is busy with other things."""


def question(text, gold="4", boxed=True):
    return CheckRequest(gold=gold, candidate=Candidate(text=text, boxed=boxed))


def verdict_of(pool, text, gold="4"):
    return pool.submit(question(text, gold)).result(BATCH_LIMIT).verdict


def wait_until(condition):
    end = time.monotonic() + BATCH_LIMIT
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_busy(pid):
    """Until it has used more time than its self-test takes: it must have its question."""
    wait_until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) > 0.3)


@pytest.fixture(scope="module")
def pool():
    pool = CheckingPool(num_workers=2, timeout_seconds=1.0)
    yield pool
    pool.close()


def test_verdicts(pool):
    assert verdict_of(pool, r"\sqrt{16}") == "correct"
    assert verdict_of(pool, r"\sqrt{15}") == "incorrect"
    checked = pool.submit(question("I think it is $4$.", boxed=False)).result(BATCH_LIMIT)
    assert (checked.verdict, checked.answer) == ("correct", "4")
    none = pool.submit(question("I do not know.", boxed=False)).result(BATCH_LIMIT)
    assert (none.verdict, none.answer) == ("unparseable", None)


def test_unevaluated_answers_are_a_matter_of_choice(pool):
    text, gold = r"\int_0^1 2x\,dx", "1"
    strict = question(text, gold)
    lenient = CheckRequest(gold=gold, candidate=strict.candidate, forbid_unevaluated=False)
    assert pool.submit(strict).result(BATCH_LIMIT).verdict == "incorrect"
    assert pool.submit(lenient).result(BATCH_LIMIT).verdict == "correct"
    assert verdict_of(pool, text, text) == "correct"


def test_d16_an_endless_answer_ends_at_its_limit_and_harms_no_neighbour(pool):
    verdict_of(pool, r"\sqrt{16}")  # so that no start is measured
    texts = [HANG if i % 10 == 5 else rf"\sqrt{{{i * i}}}" for i in range(30)]
    begun = time.monotonic()
    futures = [pool.submit(question(text, str(i))) for i, text in enumerate(texts)]
    verdicts = [future.result(BATCH_LIMIT).verdict for future in futures]
    assert verdicts == ["timeout" if text == HANG else "correct" for text in texts]
    assert time.monotonic() - begun < BATCH_LIMIT


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_is_replaced_and_its_answer_checked_again():
    pool = CheckingPool(num_workers=1, timeout_seconds=5.0)
    try:
        verdict_of(pool, r"\sqrt{16}")
        (worker,) = pool.process_ids()[1:]
        future = pool.submit(question(HANG))
        wait_until_busy(worker)
        os.kill(worker, signal.SIGKILL)
        # Again it takes for ever, in a second process.
        assert future.result(BATCH_LIMIT).verdict == "timeout"
        assert verdict_of(pool, r"\sqrt{16}") == "correct"
        assert is_gone(worker)
    finally:
        pool.close()


@pytest.mark.slow
def test_an_answer_that_kills_two_processes_is_an_error_not_a_zero():
    pool = CheckingPool(num_workers=1, timeout_seconds=BATCH_LIMIT)
    try:
        verdict_of(pool, r"\sqrt{16}")
        future = pool.submit(question(HANG))
        killed = set()
        while len(killed) < 2:
            for worker in set(pool.process_ids()[1:]) - killed:
                wait_until_busy(worker)
                os.kill(worker, signal.SIGKILL)
                killed.add(worker)
            time.sleep(0.01)
        checked = future.result(BATCH_LIMIT)
        assert checked.verdict == "error"
        assert "died" in checked.reason
        assert verdict_of(pool, r"\sqrt{16}") == "correct"
    finally:
        pool.close()


def test_a_killed_zygote_is_replaced():
    pool = CheckingPool(num_workers=1, timeout_seconds=3.0)
    try:
        verdict_of(pool, r"\sqrt{16}")
        zygote, worker = pool.process_ids()
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: is_gone(worker))
        assert verdict_of(pool, r"\sqrt{25}", "5") == "correct"
        assert zygote not in pool.process_ids()
    finally:
        pool.close()


@pytest.mark.slow
def test_a_process_is_replaced_after_its_share_of_answers():
    pool = CheckingPool(num_workers=1, timeout_seconds=BATCH_LIMIT, items_of_a_life=2)
    try:
        seen = []
        for _ in range(5):
            assert verdict_of(pool, r"\sqrt{16}") == "correct"
            seen.append(tuple(pool.process_ids()[1:]))
        # After the first answer it is still there, after the second it is not.
        assert [len(processes) for processes in seen] == [1, 0, 1, 0, 1]
        assert len({processes for processes in seen if processes}) == 3
    finally:
        pool.close()


def test_memory_is_limited(pool):
    verdict_of(pool, r"\sqrt{16}")
    for pid in pool.process_ids()[1:]:
        limits = Path(f"/proc/{pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
        assert line.split()[3] == str(2 << 30)


@pytest.mark.slow
def test_a_process_knows_no_secret_of_ours(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    pool = CheckingPool(num_workers=1, timeout_seconds=3.0)
    try:
        verdict_of(pool, r"\sqrt{16}")
        for pid in pool.process_ids():
            assert b"SOME_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        pool.close()


def test_at_most_one_process_per_core():
    pool = CheckingPool(num_workers=1_000, timeout_seconds=3.0)
    assert pool.num_workers == available_cores()
    assert pool.process_ids() == []
    pool.close()


@pytest.mark.slow
def test_closing_leaves_no_process_and_fails_what_is_under_way():
    pool = CheckingPool(num_workers=2, timeout_seconds=60.0)
    futures = [pool.submit(question(HANG)) for _ in range(4)]
    wait_until(lambda: len(pool.process_ids()) > 1)
    processes = pool.process_ids()
    pool.close()
    pool.close()
    assert all(map(is_gone, processes))
    for future in futures:
        with pytest.raises(EnvironmentFailedError, match="shut down"):
            future.result(BATCH_LIMIT)
    with pytest.raises(EnvironmentFailedError, match="shut down"):
        pool.submit(question("4"))


@pytest.mark.slow
def test_a_forgotten_pool_takes_its_processes_with_it():
    pool = CheckingPool(num_workers=1, timeout_seconds=3.0)
    verdict_of(pool, r"\sqrt{16}")
    processes = pool.process_ids()
    del pool
    gc.collect()
    assert all(map(is_gone, processes))


PROGRAM = """
import sys, time
from laurel.environments.math.pool import CheckingPool, CheckRequest
from laurel.environments.math.answers import Candidate
pool = CheckingPool(num_workers=1, timeout_seconds=100.0)
pool.submit(CheckRequest(gold="4", candidate=Candidate(text="\\\\sqrt{16}"))).result()
pool.submit(CheckRequest(gold="4", candidate=Candidate(text="9^{9^{9}}")))
time.sleep(0.2)
print(*pool.process_ids(), flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_processes_die_with_a_killed_owner_even_in_the_middle_of_an_answer():
    owner = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    with owner:
        processes = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(processes) == 2
        assert not any(map(is_gone, processes))
        owner.kill()
    wait_until(lambda: all(map(is_gone, processes)))


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


def test_any_thread_may_ask(pool):
    found = {}

    def ask(number):
        texts = [(rf"\sqrt{{{i * i}}}", str(i)) for i in range(number, 80, 4)]
        found[number] = {verdict_of(pool, text, gold) for text, gold in texts}

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: {"correct"} for number in range(4)}


@pytest.mark.parametrize(
    ("library", "complaint"),
    [
        (
            "ExprExtractionConfig = LatexExtractionConfig = lambda: None\n"
            "def parse(text, *_, **__): return [text]\n"
            "def verify(*_, **__): return False\n",
            r"wrong verdicts on known answers.*4 for 4: incorrect",
        ),
        ("raise ImportError('a wheel is missing')\n", r"does not start(.|\n)*a wheel is missing"),
    ],
)
def test_a_checker_that_lies_or_does_not_start_is_refused(
    library, complaint, tmp_path, monkeypatch
):
    (tmp_path / "math_verify.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)  # the zygote looks where this process does
    pool = CheckingPool(num_workers=1, timeout_seconds=1.0)
    try:
        for _ in range(2):
            with pytest.raises(EnvironmentFailedError, match=complaint):
                pool.submit(question("4")).result(BATCH_LIMIT)
        assert pool.process_ids() == []
    finally:
        pool.close()


@pytest.fixture
def checker():
    checker = AnswerChecker(num_workers=2, timeout_seconds=1.0)
    yield checker
    checker.close()


def test_shortcuts_start_no_process(checker):
    boxed = [r"\boxed{42}", r"\boxed{\frac12}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\int_0^1 x}", ""]
    found = [one.verdict for one in checker.check(boxed, ["42", "0.5", "4", "0.5", "4"])]
    assert found == ["correct", "correct", "incorrect", "incorrect", "unparseable"]
    assert checker.pool.process_ids() == []


def test_equal_answers_are_checked_once_and_remembered(checker):
    found = checker.check([r"\boxed{\sqrt{16}}"] * 64, ["4"] * 64)
    assert {one.verdict for one in found} == {"correct"}
    checker.pool.close()  # whatever is asked now comes from memory
    (again,) = checker.check([r"so \boxed{\sqrt{16}}"], ["4"])
    assert again == found[0]


@pytest.mark.slow
def test_a_timeout_is_not_remembered(checker):
    text = r"\boxed{\binom{1000000000}{500000000}}"
    (first,) = checker.check([text], ["4"])
    assert first.verdict == "timeout"
    checker.pool.close()
    with pytest.raises(EnvironmentFailedError):
        checker.check([text], ["4"])


@pytest.mark.parametrize("gold", ["", "  ", "x" * 10_001])
def test_a_known_answer_that_cannot_be_used_is_an_error(checker, gold):
    (checked,) = checker.check([r"\boxed{4}"], [gold])
    assert checked.verdict == "error"
    assert checked.reason


@pytest.mark.slow_parameters("\\x00", "a\\ud83d", "\\\\boxed{\\ud800+1}", "text4")
@pytest.mark.parametrize("text", ["\ud800", "\x00", "a\ud83d", "\\boxed{\ud800+1}", "☃" * 3_000])
def test_odd_characters_do_no_harm(checker, text):
    first, second = checker.check([text, r"\boxed{\sqrt{16}}"], ["4", "4"])
    assert first.verdict in ("incorrect", "unparseable")
    assert second.verdict == "correct"

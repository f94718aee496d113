"""Programs that a server runs: the same verdicts, and what becomes of a server that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import code_server
from laurel.config.environments import SandboxConfig
from laurel.environments.code.sandbox import open_pool
from laurel.environments.code_environment import CodeEnvironment
from laurel.errors import ConfigError
from laurel.sandbox.jobs import CallTest, Limits, SandboxJob, Status, StdioTest
from laurel.sandbox.pool import SandboxPool
from laurel.sandbox.remote import RemoteRunner
from laurel.sandbox.tiers import Tier

LIMITS = Limits(cpu_s=2, wall_s=4, stdout_kb=8, stderr_kb=8, result_kb=8)


def pool_of(url: str, **options: Any) -> SandboxPool:
    return SandboxPool(
        tier=Tier.REMOTE, num_workers=2, make_runner=partial(RemoteRunner, url, **options)
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with code_server.serving() as url, pool_of(url) as pool:
        yield pool


def run(pool: SandboxPool, code: str, **fields: Any) -> Any:
    (result,) = pool.run([SandboxJob(code=code, limits=LIMITS, **fields)])
    assert result.status is not Status.SANDBOX_ERROR, result.reason
    return result


@pytest.mark.slow_parameters(
    "while True: pass-Status.TIMEOUT_CPU", "import time; time.sleep(100)-Status.TIMEOUT_WALL"
)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(input()[::-1])", Status.OK),
        ("print(input())", Status.WRONG_ANSWER),
        ("print(input()[::-1]", Status.SYNTAX_ERROR),
        ("raise ValueError", Status.RUNTIME_ERROR),
        ("import sys; sys.exit(3)", Status.RUNTIME_ERROR),
        ("while True: pass", Status.TIMEOUT_CPU),
        ("import time; time.sleep(100)", Status.TIMEOUT_WALL),
        ("while True: print('x' * 1000)", Status.OUTPUT_LIMIT),
        ("x = 'x' * (1 << 40)", Status.MEMORY_LIMIT),
        ("import os; os.kill(os.getpid(), 11)", Status.KILLED),
        ("import os; os.kill(os.getppid(), 9)", Status.KILLED),
    ],
)
def test_programs_have_the_verdicts_that_they_have_here(
    pool: SandboxPool, code: str, status: Status
) -> None:
    result = run(pool, code, mode="stdio", tests=(StdioTest(stdin="abc", stdout="cba"),))
    assert result.status is status
    assert result.tier == "R"


def test_calls_are_compared_on_this_side(pool: SandboxPool) -> None:
    tests = (CallTest(args=([3, 1, 2],), expected=[1, 2, 3]), CallTest(args=([],), expected=()))
    result = run(pool, "def f(x):\n    return sorted(x)", mode="call", entry="f", tests=tests)
    assert [one.status for one in result.tests] == [Status.OK, Status.WRONG_ANSWER]
    forged = run(
        pool,
        "import os, json\nos.write(1, b'{}')\ndef f(x):\n    os._exit(0)",
        mode="call",
        entry="f",
        tests=tests,
    )
    assert forged.status is Status.NO_RESULT


TESTS = "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\ncheck(square)\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def square(x):\n    return x * x", Status.OK),
        ("def square(x):\n    return x + 2", Status.WRONG_ANSWER),
        ("def square(x):\n    raise KeyError", Status.RUNTIME_ERROR),
        ("import os\ndef square(x):\n    os._exit(0)", Status.NO_RESULT),
        ("def square(x):\n    while True: pass", Status.TIMEOUT_CPU),
        (
            "class A:\n    def __eq__(self, other): return True\ndef square(x):\n    return A()",
            Status.WRONG_ANSWER,
        ),
        ("print('passed')\nsquare = 4", Status.WRONG_ANSWER),
    ],
)
def test_tests_run_in_another_process_than_the_program(
    pool: SandboxPool, code: str, status: Status
) -> None:
    result = run(pool, code, mode="tests", entry="square", test_code=TESTS)
    if code.startswith("print"):  # what is no function fails one way or the other
        assert result.status not in (Status.OK, Status.SANDBOX_ERROR)
    elif "__eq__" in code:
        assert result.status in (Status.WRONG_ANSWER, Status.BAD_RESULT)
    else:
        assert result.status is status


def failing(status: int, body: bytes) -> code_server.Answering:
    return lambda request: (status, body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (failing(500, b"oh"), "answered 500: oh"),
        (failing(200, b"<html>"), "did not answer as /run_code does"),
        (failing(200, b"[]"), "did not answer as /run_code does"),
        (
            failing(200, json.dumps({"status": "SandboxError", "message": "full"}).encode()),
            "SandboxError: full",
        ),
        (
            failing(
                200,
                json.dumps(
                    {
                        "status": "Failed",
                        "run_result": {"status": "TimeLimitExceeded", "stdout": ""},
                    }
                ).encode(),
            ),
            "TimeLimitExceeded",
        ),
    ],
)
def test_what_the_server_fails_at_is_no_verdict(answer: code_server.Answering, said: str) -> None:
    with code_server.serving(answer) as url, pool_of(url) as pool:
        (result,) = pool.run([SandboxJob(code="print(1)")])
        assert result.status is Status.SANDBOX_ERROR
        assert said in result.reason
        assert result.attempt == 2, "it was tried again"


def test_a_server_that_is_not_there_is_no_verdict() -> None:
    with code_server.serving() as url:
        pass
    with pool_of(url) as pool:
        (result,) = pool.run([SandboxJob(code="print(1)")])
    assert result.status is Status.SANDBOX_ERROR
    assert url in result.reason


@pytest.mark.slow
def test_a_configuration_is_tried_before_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    lies = failing(200, json.dumps({"status": "Success", "run_result": {"stdout": "42"}}).encode())
    with code_server.serving(lies) as url, pytest.raises(ConfigError, match="cannot be used"):
        open_pool(SandboxConfig(url=url))
    with pytest.raises(ConfigError, match="not an address"):
        open_pool(SandboxConfig(url="127.0.0.1:8080"))
    with pytest.raises(ValueError, match="there is no url"):
        SandboxConfig(api_key_env="CODE_KEY")
    with code_server.serving(key="s" * 32) as url:
        with pytest.raises(ConfigError, match="CODE_KEY: there is no such environment variable"):
            open_pool(SandboxConfig(url=url, api_key_env="CODE_KEY"))
        with pytest.raises(ConfigError, match="answered 401"):
            open_pool(SandboxConfig(url=url))
        monkeypatch.setenv("CODE_KEY", "s" * 32)
        open_pool(SandboxConfig(url=url, api_key_env="CODE_KEY")).close()


@pytest.mark.slow
def test_the_code_environment_on_a_server() -> None:
    task = {"entry": "square", "test_code": TESTS}
    with code_server.serving() as url:
        settings = {"num_workers": 2, "sandbox": {"url": url, "cpu_seconds": 2}}
        with CodeEnvironment(settings) as environment:
            logs = [
                [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": f"```python\n{c}\n```"},
                ]
                for c in ("def square(x): return x * x", "def square(x): return 2 * x")
            ]
            found = environment.step(logs, [task, task])
    assert found.rewards.tolist() == [1.0, 0.0]
    assert found.metadata[0]["tier"] == "R"

"""Programs run by a server: SandboxFusion's `/run_code`, or whatever speaks like it.

The server locks programs in. Verdicts are drawn here, as of programs of this machine; a program and
the tests that call it are two processes of one run, kept apart by nothing but that.
"""

from __future__ import annotations

import base64
import json
import secrets
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import httpx2

from laurel.sandbox.jobs import Limits
from laurel.sandbox.runner import Outcome, SandboxLostError
from laurel.sandbox.tiers import Tier

_INSIDE = "laurel.sandbox.inside"
_GRACE_SECONDS = 10.0
"""For the server to start the run, beyond the wall clocks of its processes."""
_WAIT_SECONDS = 60.0
"""For its turn at the server, besides."""
_MOST_BYTES = 16 * 2**20
_SHOWN = 200

# The sources of `inside` travel with each program; nothing has to be installed there.
_LOADER = """\
import base64, importlib.abc, importlib.util, json, sys, types, zlib
SOURCES = json.loads(zlib.decompress(base64.b64decode({sources!r})))
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES or any(known.startswith(name + ".") for known in SOURCES):
            return importlib.util.spec_from_loader(name, self, is_package=name not in SOURCES)
    def exec_module(self, module):
        exec(compile(SOURCES.get(module.__name__, ""), module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
from {inside}.elsewhere import main
main(json.loads({order!r}))
"""


class RemoteRunner:
    """One connection to the server. Used by one thread."""

    layers: frozenset[str] = frozenset()
    pid: int | None = None
    tier: Tier | None = None

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Hold an address; nothing is sent yet.

        Args:
            url: Of the server, without `/run_code`.
            api_key: Sent as a bearer token.
        """
        self.starts = 0
        self._url = f"{url.rstrip('/')}/run_code"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client: httpx2.Client | None = None

    def start(self) -> None:
        """See `Runner`."""
        if self._client is None:
            self.starts += 1
            self._client = httpx2.Client(headers=self._headers, trust_env=False)

    def one(
        self, header: Mapping[str, Any], *parts: bytes, limits: Limits, stdin: bytes = b""
    ) -> Outcome:
        """See `Runner`."""
        return self._run([_job(header, parts, stdin)], limits)[0]

    def pair(
        self,
        code: bytes,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        is_waiting: Callable[[Outcome], bool],
    ) -> tuple[Outcome, Outcome]:
        """See `Runner`. Whether the program is waited for is decided where it runs."""
        outcome, verdict = self._run([_job({"kind": "serve"}, [code]), _job(header, parts)], limits)
        return verdict, outcome

    def discard(self) -> None:
        """See `Runner`."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """See `Runner`."""
        self.discard()

    def _run(self, jobs: list[dict[str, Any]], limits: Limits) -> list[Outcome]:
        order = json.dumps({"jobs": jobs, "limits": limits.message()})
        seconds = limits.wall_s * len(jobs) + _GRACE_SECONDS
        mark = secrets.token_hex(16)
        request = {
            "code": _LOADER.format(sources=_sources(), inside=_INSIDE, order=order),
            "language": "python",
            "stdin": f"{mark}\n",
            "run_timeout": seconds,
            "compile_timeout": seconds,
            # Of all processes together, and of Python itself.
            "memory_limit_MB": len(jobs) * limits.mem_mb + 256,
            "files": {},
            "fetch_files": [],
        }
        stdout = self._asked(request, seconds + _WAIT_SECONDS)
        report = _report_in(stdout, mark)
        if report is None or len(report) != len(jobs):
            # It ended its keeper: that is its own doing, as the server itself did what it was told.
            return [Outcome(ended_by="exit", signal=9)] * len(jobs)
        return [_outcome(one) for one in report]

    def _asked(self, request: Mapping[str, Any], timeout: float) -> str:
        """What the run printed."""
        self.start()
        assert self._client is not None
        try:
            with self._client.stream("POST", self._url, json=request, timeout=timeout) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise SandboxLostError(f"{self._url} says more than {_MOST_BYTES} bytes")
        except (httpx2.HTTPError, OSError) as error:
            raise SandboxLostError(f"{self._url}: {type(error).__name__}: {error}") from error
        shown = bytes(body[:_SHOWN]).decode("utf-8", "replace")
        if response.status_code != 200:
            raise SandboxLostError(f"{self._url} answered {response.status_code}: {shown}")
        try:
            reply = json.loads(body)
            status, ran = reply["status"], reply.get("run_result") or {}
            if status == "SandboxError" or ran.get("status") == "TimeLimitExceeded":
                said = reply.get("message") or ran.get("status")
                raise SandboxLostError(f"{self._url}: {status}: {str(said)[:_SHOWN]}")
            return str(ran["stdout"] or "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"{self._url} did not answer as /run_code does: {shown}"
            raise SandboxLostError(said) from error


def _job(header: Mapping[str, Any], parts: Any, stdin: bytes = b"") -> dict[str, Any]:
    return {
        "header": dict(header),
        "parts": [base64.b64encode(part).decode() for part in parts],
        "stdin": base64.b64encode(stdin).decode(),
    }


def _report_in(stdout: str, mark: str) -> list[dict[str, Any]] | None:
    """The report behind the mark; None where there is none."""
    _, found, said = stdout.rpartition(mark)
    try:
        report = json.loads(said) if found else None
    except ValueError:
        return None
    return report if isinstance(report, list) else None


def _outcome(said: Mapping[str, Any]) -> Outcome:
    return Outcome(
        ended_by=said["ended_by"],
        exit_code=said["exit_code"],
        signal=said["signal"],
        cpu_s=said["cpu_s"],
        wall_s=said["wall_s"],
        max_rss_kb=said["max_rss_kb"],
        stdout=base64.b64decode(said["stdout"]),
        stderr=base64.b64decode(said["stderr"]),
        result=base64.b64decode(said["result"]),
        truncated=frozenset(said["truncated"]),
    )


@cache
def _sources() -> str:
    """The sources of `inside`, packed."""
    folder = resources.files(_INSIDE)
    found = {
        f"{_INSIDE}.{file.name.removesuffix('.py')}": file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".py") and file.name != "__init__.py"
    }
    return base64.b64encode(zlib.compress(json.dumps(found).encode(), 9)).decode()

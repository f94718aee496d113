"""Serves the page of a run in progress on this machine only, for `laurel report --follow`.

One thread renders the page again when the run has written something; requests are answered with the
latest page. The browser polls the version, and replaces the page in place.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple

from laurel.errors import ConfigError, DataError
from laurel.extensions.report.page import Live, content_policy, page_of, page_script
from laurel.extensions.report.samples import RunSamples, stamps_of
from laurel.observe.run_record import COMPLETIONS_DIRECTORY, EVALUATIONS, RunRecord, read_run_record

HOST = "127.0.0.1"
MIN_SECONDS = 2.0
"""The least time between two pages."""
SHARE_OF_TIME = 0.05
"""The share of a core's time that rendering may take, because the run needs the rest."""
MAX_SECONDS = 30.0
"""The longest time between two pages, so that a reader sees the run progress."""


@dataclass(frozen=True, slots=True)
class Served:
    """A version of the page, with the state of its runs."""

    page: bytes
    version: int
    ended: bool
    text: str


class FollowedRuns:
    """Keeps the current version of the page of some runs."""

    def __init__(
        self,
        runs: Sequence[Path],
        *,
        title: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = list(runs)
        self._title = title
        self._say = say
        self._clock = clock
        self._samples = [RunSamples() for _ in runs]
        self._stamps: object = None
        self._records: list[RunRecord] = []
        self._last_message = ""
        self.seconds_to_wait = MIN_SECONDS
        self.served = Served(b"", 0, False, "")

    def refresh(self) -> None:
        """Check the files of the runs, and render the page again if one of them has changed.

        If a file is broken, perhaps because it is being written, the page stays unchanged.

        Raises:
            DataError: There is no page yet, and a directory holds no run, or a broken file.
        """
        started = time.perf_counter()
        # Timestamps are read before the files, so that later writes are noticed next time.
        stamps = [
            stamps_of(
                (
                    *run.glob("*.json*"),
                    *run.glob("*.yaml"),
                    *run.glob(f"*/{EVALUATIONS}"),
                    run / COMPLETIONS_DIRECTORY,  # it changes with each new file
                )
            )
            for run in self._runs
        ]
        try:
            if stamps != self._stamps:
                self._records = [read_run_record(run) for run in self._runs]
                version = self.served.version + 1
                live = Live(version=version, seconds=MIN_SECONDS)
                page = page_of(self._records, self._samples, title=self._title, live=live)
                self._stamps = stamps
                self.served = Served(
                    page.encode("utf-8", "backslashreplace"), version, self.served.ended, ""
                )
        except DataError as error:
            if not self.served.version:
                raise
            self._tell(f"the page stays as it was: {error}")
        spent = time.perf_counter() - started
        # Long runs take long to render, so the wait grows with that time, within limits.
        self.seconds_to_wait = min(max(MIN_SECONDS, spent / SHARE_OF_TIME), MAX_SECONDS)
        self._describe(stamps)

    def _describe(self, stamps_of_runs: Sequence[dict[Path, tuple[int, int]]]) -> None:
        # The state is shown on the page, and also on the terminal once the runs have ended.
        states = [
            state_of(
                record,
                seconds_quiet=self._clock()
                - max((time_ns for time_ns, _ in stamps.values()), default=0) / 1e9,
            )
            for record, stamps in zip(self._records, stamps_of_runs, strict=True)
        ]
        ended = all(state.ended for state in states)
        text = "; ".join(
            _activity(record, state) for record, state in zip(self._records, states, strict=True)
        )
        before = self.served
        self.served = Served(before.page, before.version, ended, text)
        if ended and not before.ended:
            self._tell(f"{text}. The page stays as it is; Ctrl-C ends the server.")

    def _tell(self, text: str) -> None:
        if text != self._last_message:
            self._last_message = text
            self._say(text)


def follow(
    runs: Sequence[Path],
    *,
    title: str,
    port: int,
    say: Callable[[str], None],
    stop: threading.Event | None = None,
) -> None:
    """Serve the page until `stop` is set or the user presses Ctrl-C.

    Raises:
        ConfigError: The port cannot be used.
        DataError: A directory holds no run, or a broken file.
    """
    stop = stop or threading.Event()
    followed = FollowedRuns(runs, title=title, say=say)
    try:
        server = _Server((HOST, port), _Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {port}: cannot listen on {HOST}: {reason}; choose another, or 0 for any"
        ) from error
    server.followed = followed
    with server:
        followed.refresh()
        thread = threading.Thread(target=server.serve_forever, name="report", daemon=True)
        thread.start()
        say(f"http://{HOST}:{server.server_address[1]}/")
        try:
            while not stop.wait(followed.seconds_to_wait):
                followed.refresh()
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    followed: FollowedRuns


class _Handler(BaseHTTPRequestHandler):
    # It serves the page as `/`, and its version and the state of the runs as `/state`.
    server_version = "laurel"
    sys_version = ""
    timeout = 30
    server: _Server

    def do_GET(self) -> None:
        """Answer a request for the page or its state."""
        served = self.server.followed.served
        # Prevents DNS rebinding: pages of a foreign name that points here could read the answers.
        port = self.server.server_address[1]
        names = (HOST, "localhost")
        ours = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in ours:
            self._answer(HTTPStatus.FORBIDDEN, b"This server answers only under its own address.\n")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, served.page, "text/html; charset=utf-8")
        elif self.path == "/state":
            state = {"version": served.version, "ended": served.ended, "text": served.text}
            self._answer(HTTPStatus.OK, json.dumps(state).encode(), "application/json")
        elif self.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT, b"")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"Only / and /state are here.\n")

    def do_HEAD(self) -> None:
        """Answer a request with the headers only."""
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        policy = content_policy(page_script(), Live(version=0, seconds=MIN_SECONDS))
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the terminal is for messages to the user."""


def _activity(record: RunRecord, state: RunActivity) -> str:
    name = record.path.name
    if state.ended:
        return f"{name} has ended at step {record.num_steps:,} ({state.reason})"
    return f"{name} goes on: step {record.num_steps:,}"


LOCK_FILE = ".lock"
"""The lock in a run's checkpoint directory (`models/checkpoint/store.py`)."""
QUIET_AFTER_LAST_STEP = 20.0
"""The seconds without a write after which a run that reached its last step counts as ended."""
QUIET = 900.0
"""The seconds without a write after which a run counts as ended if nothing else is known."""


class RunActivity(NamedTuple):
    """Whether a run has ended, and why it counts as ended."""

    ended: bool
    reason: str = ""


def state_of(record: RunRecord, *, seconds_quiet: float) -> RunActivity:
    """Find out whether a run has ended.

    If the lock of its checkpoints names a process on this machine, that process decides. Otherwise
    the run has ended if it reached its configured last step, or wrote nothing for a long time.
    """
    process = _process(record.settings)
    if process == "runs":
        return RunActivity(ended=False)
    if process == "gone":
        return RunActivity(ended=True, reason="its process has ended")
    section = record.settings.get(record.kind) or {}
    planned = section.get("max_num_steps") if isinstance(section, Mapping) else None
    if isinstance(planned, int) and 0 < planned <= record.num_steps:
        if seconds_quiet >= QUIET_AFTER_LAST_STEP:
            return RunActivity(ended=True, reason=f"it has reached its last step, {planned:,}")
    elif seconds_quiet >= QUIET:
        minutes = round(seconds_quiet / 60)
        return RunActivity(
            ended=True, reason=f"it has written nothing for {minutes:,} minutes: ended, or stuck"
        )
    return RunActivity(ended=False)


def _process(settings: Mapping[str, Any]) -> Literal["runs", "gone", "unknown"]:
    saving = settings.get("checkpointing") or {}
    directory = saving.get("checkpoint_dir") if isinstance(saving, Mapping) else None
    if not isinstance(directory, str) or not saving.get("enabled", True):
        return "unknown"
    try:
        lock = (Path(directory).expanduser() / LOCK_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "unknown"
    match = re.fullmatch(r"process (\d+) on (\S+)\n?", lock)
    if match is None or match[2] != socket.gethostname():
        return "unknown"
    try:
        os.kill(int(match[1]), 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return "gone"
    except (PermissionError, OverflowError):
        return "runs"
    return "runs"

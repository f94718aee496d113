"""A server that speaks as SandboxFusion's `/run_code` does, in threads of this process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[dict[str, Any]], tuple[int, bytes]]


def run(request: dict[str, Any]) -> dict[str, Any]:
    """What it says of a program that it has run, without any isolation."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=request["run_timeout"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {
            "status": "Failed",
            "message": "",
            "run_result": {
                "status": "TimeLimitExceeded",
                "execution_time": request["run_timeout"],
                "return_code": None,
                "stdout": "",
                "stderr": "",
            },
        }
    return {
        "status": "Failed" if done.returncode else "Success",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished",
            "execution_time": time.monotonic() - began,
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        },
        "files": {},
    }


def honest(request: dict[str, Any]) -> tuple[int, bytes]:
    """Runs what it is asked to run."""
    return 200, json.dumps(run(request)).encode()


@contextmanager
def serving(answer: Answering = honest, *, key: str | None = None) -> Iterator[str]:
    """The address of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            status, reply = 404, b"{}"
            if not allowed:
                status, reply = 401, b'{"detail": "who are you?"}'
            elif self.path == "/run_code":
                status, reply = answer(json.loads(body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

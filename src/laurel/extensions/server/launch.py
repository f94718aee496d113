"""Runs a server as long as the process that started it lives: `python launch.py COMMAND ...`.

The end of standard input is the end of that process, however it came; then the server and all that
it started are killed. Until then it goes on, whatever signals come, such as Ctrl-C: they are meant
for that process, and without this one nothing would end the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command, and return its exit code, or 128 and the signal that ended it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN the server does not inherit it
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        kill()

    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    kill()  # what it started may live on
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(sys.argv[1:]))  # the thread still reads

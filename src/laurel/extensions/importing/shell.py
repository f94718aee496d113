"""Runs a shell script to see which programs it would start, and starts none of them.

Bash and a list of tools for texts and paths run in a sandbox without a network, in which only a
temporary directory can be written to. Whatever else the script starts is noted down instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laurel.sandbox.inside_process import SandboxStartError, inside_command, own_interpreter
from laurel.sandbox.scratch import ScratchFolder

_LONGEST_S = 20.0
_LATE_S = 2.0
_CPU_S, _FILE_MB, _MEMORY_MB = 10, 8, 1024
_WHERE_TOOLS_ARE = "/usr/bin:/bin:/usr/local/bin"
_TOOLS = (
    *("awk", "base64", "basename", "bash", "bc", "cat", "cut", "date", "dirname", "echo", "egrep"),
    *("env", "expr", "false", "find", "getopt", "grep", "head", "hostname", "id", "ls", "md5sum"),
    *("mktemp", "nproc", "paste", "printf", "pwd", "readlink", "realpath", "rev", "sed", "seq"),
    *("sh", "sha256sum", "sort", "stat", "tac", "tail", "test", "tr", "true", "uname", "uniq"),
    *("wc", "which", "whoami"),
)
_TRIED = ("chmod", "cp", "ln", "mkdir", "mv", "rm", "rmdir", "tee", "touch")
"""The tools that change files; whether they can is nothing that a script should end for."""
_NOTED = (
    *("accelerate", "deepspeed", "mpirun", "nohup", "python", "python3", "ray", "srun"),
    *("timeout", "torchrun", "trl", "uv", "xargs"),
)
"""The programs that are noted down even where another program starts them, such as `exec`; all
others are where bash does.
"""
_NOTE = """#!{bash}
words=("${{0##*/}}" "$@")
[ "${{words[0]}}" = .call ] && words=("$@")
captured=0
[ -p /dev/stdout ] && captured=1
printf '%s\\0' "${{#words[@]}}" "$captured" "${{words[@]}}" >> {calls}
# Whether a module is there is asked in this way; of ours none is.
[[ "${{words[0]}}" = python* && "${{words[1]}}" = -c && "${{words[2]}}" = import\\ * ]] && exit 1
[ $captured = 1 ] && printf '@laurel:output:%s@\\n' "${{words[0]##*/}}"
exit 0
"""
_TRY = """#!{bash}
{tool} "$@" 2> /dev/null
exit 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """A program that a script would have started."""

    words: tuple[str, ...]
    """Its name and its arguments."""
    is_captured: bool
    """Whether the script reads its output, instead of which it got a placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What a script did."""

    calls: tuple[ProgramCall, ...]
    """The programs that it would have started, in order."""
    complaints: tuple[str, ...]
    """The lines that bash and its tools wrote to stderr."""
    exit_code: int | None
    """None if it was ended because it took too long."""


def run_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    readable: Sequence[Path] = (),
) -> ScriptRun:
    """Run a script of bash in the sandbox, as if in the working directory of this process.

    Args:
        environment: Its variables; the path of programs is added.
        readable: The directories that it may read, beside the system's libraries.

    Raises:
        SandboxStartError: There is no bash, or no sandbox that holds.
    """
    if sys.platform != "linux":
        raise SandboxStartError(f"the sandbox needs Linux, and this is {sys.platform}")
    bash = shutil.which("bash", path=_WHERE_TOOLS_ARE)
    if bash is None:
        raise SandboxStartError(f"there is no bash in {_WHERE_TOOLS_ARE}")
    with ScratchFolder("shell") as folder:
        scratch = folder.path
        box = _Box(scratch, bash)
        # The working directory is another one there.
        path = str(
            script.absolute() if isinstance(script, Path) and ".." in script.parts else script
        )
        if isinstance(script, str):
            (scratch / "stdin.sh").write_text(script, encoding="utf-8")
            path = str(scratch / "stdin.sh")
            readable = [*readable, scratch / "stdin.sh"]
        return box.run([bash, path, *arguments], environment, [*map(str, readable)])


class _Box:
    """A temporary directory with the programs that a script finds, and what it may write."""

    def __init__(self, scratch: Path, bash: str) -> None:
        self.scratch = scratch
        self.work, self.tools = scratch / "work", scratch / "bin"
        calls = scratch / "out" / "calls"
        self.executable = [str(self.tools), *map(str, Path("/").glob("lib*/ld-*"))]
        for directory in (self.work, self.tools, scratch / "out", scratch / "tmp"):
            directory.mkdir()
        # Read through this descriptor, for the script may put a link in the place of the file.
        self.calls = calls.open("x+b")
        (scratch / "canary").touch()
        with contextlib.suppress(OSError):
            for entry in os.scandir():
                (self.work / entry.name).symlink_to(Path.cwd() / entry.name)
        note = self._program(".call", _NOTE.format(bash=bash, calls=calls))
        for name in _NOTED:
            (self.tools / name).symlink_to(note)
        for name in (*_TOOLS, *_TRIED):
            tool = shutil.which(name, path=_WHERE_TOOLS_ARE)
            if tool is None:
                continue
            self.executable.append(os.path.realpath(tool))
            if name in _TRIED:
                self._program(name, _TRY.format(bash=bash, tool=tool))
            else:
                (self.tools / name).symlink_to(tool)

    def _program(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], readable: Sequence[str]
    ) -> ScriptRun:
        """Run bash confined, and return what it noted down."""
        settings = {
            "readable": [str(self.scratch), *readable],
            "executable": self.executable,
            "writable": [str(self.work), str(self.scratch / "out"), str(self.scratch / "tmp")],
            "canary": str(self.scratch / "canary"),
            "limits": {
                "RLIMIT_CPU": _CPU_S,
                "RLIMIT_FSIZE": _FILE_MB << 20,
                "RLIMIT_AS": _MEMORY_MB << 20,
            },
        }
        reading, writing = os.pipe()
        with open(reading, "rb") as report, tempfile.TemporaryFile() as stderr:
            try:
                process = subprocess.Popen(
                    inside_command(
                        own_interpreter(),
                        "laurel.extensions.importing.inside.shell",
                        f"{writing}, {list(command)!r}, **{settings!r}",
                    ),
                    pass_fds=[writing],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    cwd=self.work,
                    env={
                        **environment,
                        "PATH": str(self.tools),
                        "TMPDIR": str(self.scratch / "tmp"),
                        "BASH_FUNC_command_not_found_handle%%": '() { .call "$@"; }',
                        # Limits are those of the sandbox; a script should not end for them.
                        "BASH_FUNC_ulimit%%": '() { builtin ulimit "$@" 2> /dev/null || true; }',
                    },
                    start_new_session=True,  # a group of processes that can be killed together
                )
            finally:
                os.close(writing)
            try:
                # Bash does not get the descriptor, so it ends when bash has started.
                if problem := report.read():
                    raise SandboxStartError(problem.decode(errors="replace"))
                code = self._end_of(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            stderr.seek(0)
            lines = stderr.read().decode(errors="replace").splitlines()
        return ScriptRun(
            calls=tuple(self._noted()),
            # Without the commands that `set -x` prints.
            complaints=tuple(self._outside(line) for line in lines if not line.startswith("+")),
            exit_code=code,
        )

    def _end_of(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for the end of a script, and a little for what it left in the background."""
        try:
            code = process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            return None
        until = time.monotonic() + _LATE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        return code

    def _noted(self) -> Iterator[ProgramCall]:
        with self.calls as calls:
            fields = calls.read().decode(errors="replace").split("\0")
        position = 0
        while position + 2 < len(fields):
            if not fields[position].isdecimal():
                raise SandboxStartError("the script wrote into the list of what it starts")
            number = int(fields[position])
            words = fields[position + 2 : position + 2 + number]
            yield ProgramCall(
                words=tuple(map(self._outside, words)), is_captured=fields[position + 1] == "1"
            )
            position += 2 + number

    def _outside(self, text: str) -> str:
        """Return a text with the directories of the machine in place of those of the sandbox."""
        text = text.replace(str(self.tools), os.environ.get("PATH", os.defpath))
        return text.replace(str(self.work), os.getcwd())

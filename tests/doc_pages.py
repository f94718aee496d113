"""The blocks of documentation pages, and how they are run.

CONTRIBUTING.md ("Pages") has the convention for those who write pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = ROOT / "tests" / "docs"
ASK = (sys.executable, "-S", "-E", str(SCRIPTS / "ask_warm_server.py"))
PATIENCE = 600
"""Seconds for one block."""
BESIDE = ("examples", "recipes", "benchmarks", "LICENSE")
"""Names of a checkout that a page may use, at the same place in the page's folder."""

_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)[^\n`]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_SETUP = re.compile(r"^<!-- hidden setup: (\S+) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, and the comment before it."""

    place: str
    line: int
    language: str
    text: str
    kind: str
    """`run`, `not run`, `file`, `output` or `shown`."""
    value: str
    """The reason why it is not run, the file's name, or `exact`."""
    start: int
    """The offset of the text in the page."""


def blocks_of(path: Path) -> list[Block]:
    """Parse a page."""
    page = path.read_text(encoding="utf-8")
    blocks = []
    for found in _FENCE.finditer(page):
        kind, _, value = (part.strip() for part in (found["note"] or "").partition(":"))
        if kind not in ("not run", "file", "output"):
            kind, value = "run" if found["language"] in ("bash", "python", "yaml") else "shown", ""
        line = page.count("\n", 0, found.start("fence")) + 1
        text = re.sub(rf"^ {{{len(found['indent'])}}}", "", found["text"], flags=re.MULTILINE)
        place = f"{path.name}:{line}"
        blocks.append(Block(place, line, found["language"], text, kind, value, found.start("text")))
    return blocks


def outputs_of(path: Path) -> list[tuple[Block, Block]]:
    """Pair each block whose output is shown with the block that shows it."""
    return [(run, shown) for run, shown in pairwise(blocks_of(path)) if shown.kind == "output"]


# What differs from run to run: colours, hashes, figures, durations, paths, widths.
_MASKS = (
    (re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), ""),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"), "HASH"),
    (re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?"), "0"),
    (re.compile(r"\d+(?:\.\d+)?"), "0"),
    (re.compile(r"\b0 ?(?:ms|s|min|h)\b(?: 0 ?(?:ms|s|min)\b)?"), "TIME"),
    (re.compile(r"(?:/[\w.\-]+){3,}"), "PATH"),
    (re.compile(r"[\u2500-\u259f]+"), "-"),
    (re.compile(r"-{3,}"), "-"),
    (re.compile(r"[ \t]+"), " "),
)


def same(shown: str, real: str, *, exact: bool = False) -> bool:
    """Whether a page shows what was written. A line `...` stands for any lines."""

    def comparable(line: str) -> str:
        for pattern, stand_in in () if exact else _MASKS:
            line = pattern.sub(stand_in, line)
        return line.rstrip() if exact else line.strip()

    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(comparable(line)) + r"\n"
        for line in shown.strip("\n").splitlines()
    )
    lines = [comparable(line) + "\n" for line in real.strip("\n").splitlines()]
    return re.fullmatch(pattern, "".join(lines)) is not None


class BlockFailed(AssertionError):
    """A block that did not run."""


@contextmanager
def warm_server() -> Iterator[Callable[[Path, Path], dict[int, str]]]:
    """Start a process that has loaded torch, and that processes of pages are forked from.

    Loading takes four seconds, for every `laurel` of every page. What it yields runs the blocks of
    a page in a new folder, and returns what each wrote, by its line.
    """
    with tempfile.TemporaryDirectory(prefix="laurel-docs-") as name:
        (Path(name) / "laurel").write_text(f'#!/bin/sh\nexec {shlex.join(ASK)} laurel "$@"\n')
        (Path(name) / "laurel").chmod(0o755)
        kept = {
            key: os.environ[key]
            for key in ("LANG", "TMPDIR", "LAUREL_DATA", "PATH")
            if key in os.environ
        }
        environment = kept | {
            "PATH": os.pathsep.join((name, str(Path(sys.executable).parent), kept["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
            "HOME": name,
            "LAUREL_WARM_SERVER": f"{name}/socket",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",  # as in the other tests
            "PYTHONDONTWRITEBYTECODE": "1",
        }

        def run(path: Path, folder: Path) -> dict[int, str]:
            home = folder / ".home"
            home.mkdir(parents=True)
            with (home / "failure.txt").open("wb") as output:
                status = subprocess.run(
                    [*ASK, "page", path],
                    cwd=folder,
                    env=environment | {"HOME": str(home)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                ).returncode
            if status:
                raise BlockFailed((home / "failure.txt").read_text())
            said = json.loads((home / "said.json").read_text())
            return {int(line): text for line, text in said.items()}

        server = [sys.executable, SCRIPTS / "warm_server.py", f"{name}/socket"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(server, env=environment, stdin=pipe, stdout=pipe, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the warm server did not start"
            yield run
        finally:
            process.kill()
            process.communicate()


def run_page(path: Path) -> None:
    """Run a page's setups and blocks in the working directory, up to the first that fails.

    The warm server calls this in a process of the page's own, which Python blocks run in.
    """
    here, home = Path.cwd(), Path(".home").resolve()
    said: dict[int, str] = {}
    groups: list[int] = []
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done after {PATIENCE} s"))
    # Readers of the README stand in an empty folder, readers of other pages in a checkout.
    for name in BESIDE if path.name != "README.md" else ():
        Path(name).symlink_to(ROOT / name)

    def shell(command: list[str | Path], output: Path) -> int:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        groups.append(process.pid)
        return process.wait(PATIENCE)

    def python(block: Block, output: Path) -> int:
        with output.open("wb") as stream:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
        signal.alarm(PATIENCE)
        try:
            # Lines of tracebacks are those of the page.
            exec(compile("\n" * block.line + block.text, str(path), "exec"), vars(module))
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            signal.alarm(0)
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    def heard(place: str, text: str, output: Path, status: int) -> str:
        wrote = output.read_bytes().decode(errors="replace")
        for folder in (here, ROOT):
            wrote = wrote.replace(f"{folder}/", "").replace(str(folder), ".")
        if status:
            failure = f"{place}: exit status {status}\n{text}\n{wrote[-6000:]}"
            (home / "failure.txt").write_text(failure)
            raise SystemExit(1)
        return wrote

    try:
        for script in _SETUP.findall(path.read_text(encoding="utf-8")):
            output = home / f"{script}.txt"
            status = shell([*ASK, "script", SCRIPTS / script], output)
            heard(path.name, f"hidden setup: {script}", output, status)
        for block in blocks_of(path):
            output = home / f"{block.line}.txt"
            if block.kind == "file":
                Path(block.value).parent.mkdir(parents=True, exist_ok=True)
                Path(block.value).write_text(block.text, encoding="utf-8")
            elif block.kind == "run" and block.language != "yaml":  # YAML is read, not run
                if block.language == "bash":
                    status = shell(["bash", "-euo", "pipefail", "-c", block.text], output)
                else:
                    status = python(block, output)
                said[block.line] = heard(block.place, block.text, output, status)
        (home / "said.json").write_text(json.dumps(said))
    finally:
        for group in groups:  # a server that the page started ends with it
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

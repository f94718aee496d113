"""Makes the pictures that the pages show: `python docs/make_screens.py [NAME ...]`.

Each is of a command that is really run, in a new folder. A terminal is rendered as SVG by rich; the
report is photographed in Chromium, where this machine has one. Below every picture in the pages,
the line that says machine, command and date is written anew.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from rounds import machine  # noqa: E402

from headless_browser import browser_page, find_browser  # noqa: E402

DOCS = ROOT / "docs"
ASSETS = DOCS / "assets"
WIDTH = 120
"""Letters of a line of the terminals."""
MOST_BYTES = 200_000
_PLAN = (
    "laurel plan --config examples/configs/grpo_rm_1B.yaml --nodes 3 --gpus-per-node 8 "
    "--device-memory 80GiB env.reward_model.resources.gpus_per_node=8 "
    "--policy-shape num_parameters=1.54B,hidden_size=1536,num_layers=28,intermediate_size=8960,"
    "num_heads=12,num_kv_heads=2,vocab_size=151936 "
    "--reward-shape hidden_size=1024,num_layers=28,intermediate_size=3072,num_heads=16,"
    "num_kv_heads=8,head_dim=128,vocab_size=151936"
)
_DEMO = "laurel demo"
_AFTER_TRAINING = "5 of 6."
"""The stage of the demo from which its terminal is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A picture."""

    name: str
    """Of its file in `docs/assets`."""
    command: str
    make: Callable[[Path], None]
    """Given the folder in which the command has been run."""


def run(command: str, folder: Path) -> str:
    """What a command writes into a terminal of `WIDTH` letters, with its colours."""
    program, *arguments = shlex.split(command)
    assert program == "laurel", command
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "COLUMNS": str(WIDTH),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "TERM": "xterm-256color",
    }
    environment.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "laurel", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    (folder / "said.txt").write_text(done.stdout, encoding="utf-8")
    return done.stdout


def terminal(said: str, *, title: str, name: str) -> str:
    """An SVG of a terminal in which that was said. It asks for no fonts from elsewhere."""
    screen = Console(
        width=WIDTH,
        record=True,
        file=open(os.devnull, "w"),  # noqa: SIM115  for as long as the console
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    with screen.file:
        screen.print(Text.from_ansi(said.rstrip("\n")))
        code = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        return screen.export_svg(title=title, code_format=code, unique_id=name)


def _plan(folder: Path) -> None:
    said = (folder / "said.txt").read_text("utf-8")
    _write("plan.svg", terminal(said, title="laurel plan", name="plan").encode())


def _demo(folder: Path) -> None:
    lines = (folder / "said.txt").read_text("utf-8").splitlines()
    (start,) = (number for number, line in enumerate(lines) if _AFTER_TRAINING in line)
    shown = "\n".join(lines[start:])
    _write("demo.svg", terminal(shown, title="laurel demo", name="demo").encode())


def _report(folder: Path) -> None:
    _photograph(folder / "demo" / "report.html", "report.png", height=820)


def _curves(folder: Path) -> None:
    grpo = "[...document.querySelectorAll('h2')].find(h => h.textContent.includes('GRPO'))"
    _photograph(folder / "demo" / "report.html", "report_curves.png", height=900, at=grpo)


def _photograph(page: Path, name: str, *, height: int, at: str = "document.body") -> None:
    """A picture of a page in a browser, from an element on; `at` is JavaScript that gives it."""
    program = find_browser()
    if program is None:
        sys.exit(f"{name} needs Chromium on the PATH; Debian: apt-get install chromium")
    with browser_page(program) as tab, tempfile.TemporaryDirectory() as place:
        tab.look(width=1000, height=height)
        tab.open(page.as_uri())
        tab.run(f"{at}.scrollIntoView()")
        tab.picture(Path(place) / name)
        _write(name, (Path(place) / name).read_bytes())


def _write(name: str, picture: bytes) -> None:
    if len(picture) > MOST_BYTES:
        sys.exit(f"{name} has {len(picture):,} bytes; the site takes {MOST_BYTES:,} at most")
    (ASSETS / name).write_bytes(picture)
    print(f"{name}: {len(picture):,} bytes")


SCREENS = (
    Screen(name="plan.svg", command=_PLAN, make=_plan),
    Screen(name="demo.svg", command=_DEMO, make=_demo),
    Screen(name="report.png", command=_DEMO, make=_report),
    Screen(name="report_curves.png", command=_DEMO, make=_curves),
)


def caption(command: str, day: datetime.date) -> str:
    """Where a picture is from, for the line below it."""
    about = machine()
    when = f"{day.day} {day:%B %Y}"
    cores = f"{about['cores']} cores of {about['processor']}"
    return f"*`{command}`, {when}, {cores}; docs/make_screens.py*"


def captioned(text: str, name: str, line: str) -> str:
    """A page with that line below each place of a picture, in the place of an older one."""
    found = re.compile(
        rf"^(!\[[^\]]*\]\(assets/{re.escape(name)}\))\n(?:\n\*`[^\n]*docs/make_screens\.py\*\n)?",
        re.MULTILINE,
    )
    return found.sub(lambda place: f"{place[1]}\n\n{line}\n", text)


def main(names: Sequence[str]) -> None:
    """Make the pictures of these names, or all; a command that several show is run once."""
    chosen = [screen for screen in SCREENS if not names or screen.name in names]
    day = datetime.date.today()
    for command in dict.fromkeys(screen.command for screen in chosen):
        with tempfile.TemporaryDirectory(prefix="laurel-screens-") as place:
            folder = Path(place)
            (folder / "examples").symlink_to(ROOT / "examples")
            run(command, folder)
            for screen in (one for one in chosen if one.command == command):
                screen.make(folder)
                for page in DOCS.glob("*.md"):
                    text = page.read_text("utf-8")
                    page.write_text(captioned(text, screen.name, caption(command, day)), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of pictures; without: all")
    main(parser.parse_args().names)

"""How many scripts of a checkout of verl are imported as the command lines that they run.

`python tools/verl_scripts.py CHECKOUT [--list]`. Each script that names a trainer of verl runs in
plain bash, with stand-ins for Python, Ray and all that writes or loads, so trust the checkout. The
command line that it would start is imported for itself, and compared with the import of the
script: value by value of what stands under "carried". A value that the script takes from an
argument or from a variable that nobody set counts as right where the import says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from laurel.errors import ConfigError
from laurel.extensions.importing.rules import Imported
from laurel.extensions.importing.sources import ImportRequest, import_configuration

_TRAINERS = re.compile(r"main_ppo|main_dapo|sft_trainer")
_STARTS = re.compile(r"(^|\.)(main_ppo|main_dapo|sft_trainer(_ray)?)(\.py)?$")
_STAND_IN = """#!/bin/bash
[ "$1" = -c ] && exit 1
printf '%s\\0' "${0##*/}" "$@" >> "$CALLS/$$"
"""
_STAND_INS = (
    *("python", "python3", "torchrun", "ray", "uv", "hf", "huggingface-cli", "pip", "pip3"),
    *("wget", "curl", "git", "nvidia-smi", "npu-smi", "mkdir", "rm", "cp", "mv", "ln", "touch"),
    *("pkill", "killall", "sleep", "tee", "nohup", "sudo", "docker", "srun", "sbatch"),
)
_ARGUMENTS = ("8", "out")


def command_of(script: Path, home: Path) -> list[str] | None:
    """The words of the trainer that a script starts; None if it starts none."""
    for arguments in ((), _ARGUMENTS):
        with tempfile.TemporaryDirectory(dir=home) as calls:
            environment = {
                "PATH": f"{home}/bin:/usr/bin:/bin",
                "HOME": str(home),
                "USER": os.environ.get("USER", ""),
                "CALLS": calls,
            }
            subprocess.run(
                ["bash", str(script), *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=60,
                check=False,
            )
            for call in sorted(Path(calls).iterdir(), key=lambda path: path.stat().st_mtime_ns):
                words = call.read_text(encoding="utf-8").rstrip("\0").split("\0")
                if any(_STARTS.search(word) for word in words):
                    return words
    return None


def _imported(path: Path) -> Imported | str:
    try:
        return import_configuration(ImportRequest(path=path, system="verl")).imported
    except ConfigError as error:
        return str(error)


def differences(script: Imported, line: Imported) -> Iterator[str]:
    """What the import of a script carries that the import of its command line does not, or not so.

    The other way round, too, but for what the script's import says it cannot know.
    """
    lost = {one.key for one in script.with_status("not carried")}
    untold = {to for one in line.entries if one.key in lost for to in one.to}
    if any(key.startswith("--nproc") for key in lost):
        untold.add("cluster.gpus_per_node")
    for key in {**script.values, **line.values}:
        mine, its = script.values.get(key), line.values.get(key)
        if mine != its and key not in untold:
            yield f"{key}: {mine!r}, and of the line {its!r}"
    said = {one.key for one in script.entries}
    for one in line.entries:
        if one.is_said and one.key not in said:
            yield f"{one.key}: not read"


def outcome(script: Path, home: Path) -> tuple[str, str]:
    """`none`, `both refused`, `right`, `refused` or `differing`, with the reason."""
    words = command_of(script, home)
    if words is None:
        return "none", "it starts no trainer"
    file = home / "line.txt"
    file.write_text(shlex.join(words) + "\n", encoding="utf-8")
    line, found = _imported(file), _imported(script)
    if isinstance(line, str):
        return ("both refused" if isinstance(found, str) else "differing"), line
    if isinstance(found, str):
        return "refused", found
    odd = list(differences(found, line))
    return ("differing", "; ".join(odd)) if odd else ("right", "")


def main() -> None:
    """Print how many scripts there are of each outcome."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a directory with a work tree of verl")
    parser.add_argument("--list", action="store_true", help="print each script with its outcome")
    options = parser.parse_args()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "bin").mkdir()
        for name in _STAND_INS:
            (home / "bin" / name).write_text(_STAND_IN, encoding="utf-8")
            (home / "bin" / name).chmod(0o755)
        os.environ["HOME"] = directory
        checkout = options.checkout.resolve()
        os.chdir(home)
        for script in sorted(checkout.rglob("*.sh")):
            if not _TRAINERS.search(script.read_text(encoding="utf-8")):
                continue
            kind, why = outcome(script, home)
            counted[kind] += 1
            if options.list:
                print(kind, script.relative_to(checkout), why, sep=" | ")
    print(", ".join(f"{kind}: {number}" for kind, number in sorted(counted.items())))


if __name__ == "__main__":
    main()

"""A release in one command: checked, built, installed from the wheel, and tried with the demo.

`make release VERSION=1.2.3`, or `python tools/release.py 1.2.3 [--dry-run]` where the extra
`release` is installed. Nothing in the tree changes before all has passed; nothing is committed,
tagged or uploaded. Built is what is committed, with the new version and the date in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
INIT, CHANGELOG, CITATION = "src/laurel/__init__.py", "CHANGELOG.md", "CITATION.cff"
_VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_HEADING = re.compile(r"^## (\S+) \(([^)]+)\)$", re.MULTILINE)
_NEEDED_IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", CHANGELOG, CITATION, INIT)


class Refused(Exception):
    """A release that cannot be made; the message says why and what to do."""


def checked_version(wanted: str, *, current: str, changelog: str, tags: Iterable[str]) -> str:
    """The version in its normal form, if it may come next.

    Args:
        wanted: What was typed.
        current: What the package says it is.
        changelog: With the sections of the releases so far.
        tags: Names of git's tags.

    Raises:
        Refused: It is no version, has been released, or is not above all that were.
    """
    try:
        version = Version(wanted)
    except InvalidVersion:
        raise Refused(f"{wanted!r} is no version; write it as 1.2.3 or 1.2.3rc1") from None
    if str(version) != wanted:
        raise Refused(f"{wanted!r}: write it in its normal form, {version}")
    if version.local or version.is_devrelease:
        raise Refused(f"{wanted} is for one's own machine; a release is 1.2.3 or 1.2.3rc1")
    released = [name for name, when in _HEADING.findall(changelog) if when != "unreleased"]
    released += [tag.removeprefix("v") for tag in tags if re.fullmatch(r"v\d+(\.\d+)*\S*", tag)]
    newest = max(map(Version, released), default=None)
    if newest is not None and version <= newest:
        raise Refused(f"{wanted} is not above {newest}, which has been released")
    if version.release < Version(current).release:
        raise Refused(f"{wanted} is below {current}, which {INIT} says")
    return wanted


def with_version(init: str, version: str) -> str:
    """The package's `__init__.py` with another version."""
    changed, count = _VERSION_LINE.subn(f'__version__ = "{version}"', init)
    if count != 1:
        raise Refused(f"{INIT} has {count} lines that say __version__; there has to be one")
    return changed


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with its first section as that of this version and day.

    Raises:
        Refused: The first section is not the unreleased one, or there is nothing in it.
    """
    found = _HEADING.search(changelog)
    if found is None or found[2] != "unreleased":
        raise Refused(f"{CHANGELOG} has to begin with a section '## {version} (unreleased)'")
    following = _HEADING.search(changelog, found.end())
    if not changelog[found.end() : following.start() if following else None].strip():
        raise Refused(f"{CHANGELOG}: the section {found[1]} is empty; say what users see")
    heading = f"## {version} ({day.isoformat()})"
    return changelog[: found.start()] + heading + changelog[found.end() :]


def cited(citation: str, version: str, day: datetime.date) -> str:
    """The citation file with this version and day; before the first release it has no day."""
    lines = [line for line in citation.splitlines() if not line.startswith("date-released:")]
    places = [i for i, line in enumerate(lines) if line.startswith("version:")]
    if len(places) != 1:
        raise Refused(
            f"{CITATION} has {len(places)} lines that begin with 'version:'; it needs one"
        )
    lines[places[0]] = f'version: {version}\ndate-released: "{day.isoformat()}"'
    return "\n".join(lines) + "\n"


def wheel_misfits(names: Iterable[str], package_files: Iterable[str]) -> list[str]:
    """What is missing in a wheel, and what has no place in it.

    Args:
        names: Of the files in the wheel.
        package_files: Those of the package in the repository, below `src`.
    """
    there = {name for name in names if ".dist-info/" not in name}
    wanted = set(package_files)
    missing = [f"missing: {name}" for name in sorted(wanted - there)]
    return missing + [f"no part of the package: {name}" for name in sorted(there - wanted)]


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """The standard output of a command. Raises Refused where it fails, with its last words."""
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    if done.returncode:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise Refused(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{words}")
    return done.stdout


def tracked(root: Path) -> list[str]:
    """The files of the repository."""
    return run("git", "ls-files", "-z", cwd=root).rstrip("\0").split("\0")


def edits(root: Path, wanted: str, day: datetime.date) -> dict[str, str]:
    """The files that a release changes, by name, with their new text.

    Raises:
        Refused: The tree is not clean, or the version or a file is not as it has to be.
    """
    if changed := run("git", "status", "--porcelain", cwd=root).rstrip():
        raise Refused(f"the tree is not clean; commit or remove:\n{changed}")
    texts = {name: (root / name).read_text("utf-8") for name in (INIT, CHANGELOG, CITATION)}
    said = _VERSION_LINE.search(texts[INIT])
    if said is None:
        raise Refused(f"{INIT} has no line that says __version__")
    tags = run("git", "tag", "--list", cwd=root).split()
    version = checked_version(wanted, current=said[1], changelog=texts[CHANGELOG], tags=tags)
    return {
        INIT: with_version(texts[INIT], version),
        CHANGELOG: dated(texts[CHANGELOG], version, day),
        CITATION: cited(texts[CITATION], version, day),
    }


def export(root: Path, place: Path, changes: Mapping[str, str]) -> Path:
    """What is committed, with the changes, at a place of its own."""
    archive = place / "source.tar"
    run("git", "archive", "--output", archive, "HEAD", cwd=root)
    source = place / "source"
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    for name, text in changes.items():
        (source / name).write_text(text, encoding="utf-8")
    return source


def build(source: Path, place: Path) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    dist = place / "dist"
    run(sys.executable, "-m", "build", "--outdir", dist, source, cwd=place)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def check(root: Path, sdist: Path, wheel: Path) -> None:
    """What is in them, and what they say of themselves.

    Raises:
        Refused: Something is missing, or stands in the wheel and should not, or is malformed.
    """
    package = [f.removeprefix("src/") for f in tracked(root) if f.startswith("src/laurel/")]
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    misfits = wheel_misfits(names, package)
    if not any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in names):
        misfits.append("missing: the licence")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    misfits += [f"missing in the sdist: {n}" for n in _NEEDED_IN_SDIST if n not in inside]
    if misfits:
        raise Refused(f"{wheel.name}:\n  " + "\n  ".join(misfits))
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=wheel.parent)


def try_out(wheel: Path, version: str, place: Path) -> Mapping[str, float]:
    """Install the wheel into an environment of its own, and run the demo in an empty folder.

    Raises:
        Refused: It does not install, is not of this version, or the demo fails.
    """
    environment, empty = place / "environment", place / "empty"
    run(sys.executable, "-m", "venv", environment, cwd=place)
    python, laurel = environment / "bin" / "python", environment / "bin" / "laurel"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    say(f"installing {wheel.name} into a new environment")
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=place, env=clean)
    empty.mkdir()
    if (found := run(laurel, "--version", cwd=empty, env=clean).strip()) != f"laurel {version}":
        raise Refused(f"the installed command says {found!r}, not 'laurel {version}'")
    say("running laurel demo from it, in an empty folder")
    said = run(laurel, "demo", "--json", cwd=empty, env={**clean, "HF_HUB_OFFLINE": "1"})
    result: dict[str, float] = json.loads(said)
    return result


def release(root: Path, wanted: str, *, is_dry: bool, day: datetime.date) -> None:
    """All of it; see the top of this file."""
    started = time.monotonic()
    changes = edits(root, wanted, day)
    with tempfile.TemporaryDirectory(prefix="laurel-release-") as name:
        place = Path(name)
        say(f"building {wanted}")
        sdist, wheel = build(export(root, place, changes), place)
        check(root, sdist, wheel)
        say(f"checked {sdist.name} ({size(sdist)}) and {wheel.name} ({size(wheel)})")
        result = try_out(wheel, wanted, place)
        say(f"the demo went from {result['rate_before']:.1%} to {result['rate_after']:.1%}")
        if not is_dry:
            (root / "dist").mkdir(exist_ok=True)
            for file in (sdist, wheel):
                (root / "dist" / file.name).write_bytes(file.read_bytes())
            for file_name, text in changes.items():
                (root / file_name).write_text(text, encoding="utf-8")
    say(f"all of it took {(time.monotonic() - started) / 60:.1f} minutes")
    print(next_steps(wanted, list(changes), is_dry=is_dry))


def next_steps(version: str, changed: Sequence[str], *, is_dry: bool) -> str:
    """What is left to a person."""
    if is_dry:
        return f"a dry run: the tree is as it was. Without --dry-run, {version} is ready to go out"
    files = " ".join(changed)
    return (
        f"dist/ and {', '.join(changed)} are written. Look at them, then:\n"
        f"  git commit -m 'Release {version}' {files}\n"
        f"  git tag -a v{version} -m 'Laurel {version}'\n"
        f"  git push --follow-tags\n"
        f"  python -m twine upload dist/laurel_rl-{version}*\n"
        f"and begin the next section of {CHANGELOG}: ## NEXT (unreleased)"
    )


def size(file: Path) -> str:
    """In KiB."""
    return f"{file.stat().st_size / 1024:,.0f} KiB"


def say(text: str) -> None:
    """A line about what is being done."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="of the release, such as 1.2.3")
    parser.add_argument("--dry-run", action="store_true", help="do all of it, keep nothing")
    said = parser.parse_args()
    try:
        release(ROOT, said.version, is_dry=said.dry_run, day=datetime.date.today())
    except Refused as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()

"""Limits the memory and the processes of all programs of a sandbox by a control group.

A control group also counts what the limits of single processes do not: pages that processes share,
files in memory, and processes that a program left behind. It is not a tier of isolation, because
few machines delegate a group to an ordinary account. It is used if it is delegated and its limits
were seen to hold, and is reported with the tier.

Both versions are supported: version 2 (`memory.max`, `pids.max`, `cgroup.kill`), and version 1 with
a hierarchy for each controller.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from laurel.errors import ConfigError
from laurel.extensions.code.sandbox.jobs import Limits

CONTROLLERS = ("memory", "pids")
_NAME = re.compile(r"laurel-(\d+)-[0-9a-f]{8}")
_OLD_SECONDS = 60.0
_END_SECONDS = 5.0
# Concurrent programs of one zygote: two run at once where tests are split from a program.
_AT_A_TIME = 2
_ZYGOTE_MB = 128
_ZYGOTE_PROCESSES = 16  # itself, its monitors, and their helpers


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory in which control groups can be created.

    Args:
        version: The cgroup version, 1 or 2.
        controllers: The resources that its groups can limit.
    """

    folder: Path
    version: int
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The directories in which control groups can be created: one, or one for each controller."""

    hierarchies: tuple[Hierarchy, ...]

    @property
    def controllers(self) -> frozenset[str]:
        """The resources that can be limited."""
        return frozenset().union(*(one.controllers for one in self.hierarchies))

    def only(self, controllers: frozenset[str]) -> GroupPlace:
        """Return the same place with fewer controllers."""
        kept = [
            Hierarchy(one.folder, one.version, one.controllers & controllers)
            for one in self.hierarchies
            if one.controllers & controllers
        ]
        return GroupPlace(tuple(kept))

    def sentence(self) -> str:
        """Return a description of the place for logs."""
        versions = " and ".join(str(n) for n in sorted({one.version for one in self.hierarchies}))
        names = " and ".join(name for name in CONTROLLERS if name in self.controllers)
        return f"{names} (version {versions})"


class ControlGroup:
    """A group of processes with limits on their total use; its zygote's lock guards it."""

    def __init__(self, place: GroupPlace) -> None:
        """Create the group, without limits.

        Raises:
            OSError: The group cannot be created.
        """
        name = f"laurel-{os.getpid()}-{secrets.token_hex(4)}"
        self._parts: list[Hierarchy] = []
        self._memory = self._processes = 0
        for one in place.hierarchies:
            _remove_old(one.folder)
            part = Hierarchy(one.folder / name, one.version, one.controllers)
            try:
                part.folder.mkdir()
            except OSError:
                self.end()
                raise
            self._parts.append(part)

    def take(self, pid: int) -> None:
        """Move a process, and all that it starts later, into the group; may raise `OSError`."""
        for part in self._parts:
            _write(part.folder / "cgroup.procs", pid)

    def allow(self, limits: Limits) -> None:
        """Raise the limits so that two programs of such limits fit; never lower them."""
        megabytes = _ZYGOTE_MB + _AT_A_TIME * (limits.mem_mb + limits.disk_mb)
        self.set_limits(megabytes << 20, _ZYGOTE_PROCESSES + _AT_A_TIME * (limits.threads + 4))

    def set_limits(self, memory: int, processes: int) -> None:
        """Raise the limits of memory in bytes, and of processes and threads; never lower them."""
        if memory > self._memory:
            self._memory = memory
            for part in self._parts:
                if "memory" in part.controllers:
                    if part.version == 2:
                        _write(part.folder / "memory.max", memory)
                        with contextlib.suppress(OSError):  # without swap there is no such file
                            _write(part.folder / "memory.swap.max", 0)
                        continue
                    together = part.folder / "memory.memsw.limit_in_bytes"
                    with contextlib.suppress(OSError):  # it may never be less than memory alone
                        _write(together, -1)
                    _write(part.folder / "memory.limit_in_bytes", memory)
                    with contextlib.suppress(OSError):
                        _write(together, memory)
        if processes > self._processes:
            self._processes = processes
            for part in self._parts:
                if "pids" in part.controllers:
                    _write(part.folder / "pids.max", processes)

    def num_killed(self) -> int:
        """Return how many processes were killed for lack of memory; 0 if that is not counted."""
        for part in self._parts:
            if "memory" in part.controllers:
                name = "memory.events" if part.version == 2 else "memory.oom_control"
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)$", (part.folder / name).read_text(), re.M)
                    return int(found[1]) if found else 0
        return 0

    def end(self) -> None:
        """Kill the remaining processes, and remove the group; further calls do nothing."""
        deadline = time.monotonic() + _END_SECONDS
        while self._parts:
            part = self._parts[-1]
            _kill(part.folder)
            try:
                part.folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # killed processes are not gone yet
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
            self._parts.pop()


def find_place(folder: str | None = None, *, root: Path = Path("/")) -> tuple[GroupPlace, str]:
    """Find the directories in which this process can create control groups, without leaving any.

    Args:
        folder: A delegated cgroup v2 directory. By default this process's own groups are tried and,
            in version 2, their parents.
        root: The root of the file system, for tests.

    Returns:
        The place, which may lack some or all controllers, and the reason if any is missing.
    """
    if folder is not None:
        given = _version_2(Path(folder))
        reason = "" if given else f"{folder} gives no groups with memory or pids to this account"
        return GroupPlace((given,) if given else ()), reason
    found: list[Hierarchy] = []
    for candidate in _own_folders(root):
        had = frozenset().union(*(one.controllers for one in found))
        fits = _version_2(candidate.folder) if candidate.version == 2 else _usable(candidate)
        if fits is not None and fits.controllers - had:
            found.append(Hierarchy(fits.folder, fits.version, fits.controllers - had))
    place = GroupPlace(tuple(found))
    missing = [name for name in CONTROLLERS if name not in place.controllers]
    return place, f"{' and '.join(missing)} not delegated to this account" if missing else ""


def _own_folders(root: Path) -> Iterator[Hierarchy]:
    """Yield the mounted directories of this process's own groups, with their controllers."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)  # version 2 has no names
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split(" ")
        base, mounted = fields[3], root / fields[4].lstrip("/")
        controlled = set(options.split(",")) & set(CONTROLLERS) & set(paths)
        if kind == "cgroup2" and "" in paths:
            own = _inside(mounted, base, paths[""])
            yield Hierarchy(own, 2, frozenset(CONTROLLERS))
            if own != mounted:  # a leaf of the delegated tree: groups are made beside it
                yield Hierarchy(own.parent, 2, frozenset(CONTROLLERS))
        elif kind == "cgroup":
            for name in sorted(controlled):
                yield Hierarchy(_inside(mounted, base, paths[name]), 1, frozenset({name}))


def _inside(mounted: Path, base: str, path: str) -> Path:
    """Return a group's directory in a hierarchy whose mount begins at the group `base`."""
    beneath = os.path.relpath(path, base)
    return mounted if beneath.startswith("..") else mounted / beneath


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _version_2(folder: Path) -> Hierarchy | None:
    """Return a directory with the controllers that it delegates; None if it cannot be used."""
    wanted = set(CONTROLLERS) & set(_words(folder / "cgroup.controllers"))
    control = folder / "cgroup.subtree_control"
    for name in sorted(wanted - set(_words(control))):
        with contextlib.suppress(OSError):  # it contains processes, or is not ours
            _write(control, f"+{name}")
    have = frozenset(wanted & set(_words(control)))
    return _usable(Hierarchy(folder, 2, have)) if have else None


def _usable(one: Hierarchy) -> Hierarchy | None:
    try:
        ControlGroup(GroupPlace((one,))).end()
    except OSError:
        return None
    return one


def _words(path: Path) -> Iterable[str]:
    return " ".join(_lines(path)).split()


def _remove_old(folder: Path) -> None:
    """Remove empty groups that were left by processes which were killed."""
    with contextlib.suppress(OSError):
        for old in folder.glob("laurel-*-*"):
            named = _NAME.fullmatch(old.name)
            if named and not Path(f"/proc/{named[1]}").exists():
                with contextlib.suppress(OSError):
                    # Another container may be making it; its process number is another one here.
                    if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                        old.rmdir()


def _kill(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (folder / "cgroup.kill").exists():
            _write(folder / "cgroup.kill", 1)
            return
    for pid in _words(folder / "cgroup.procs"):
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)


def _write(path: Path, value: object) -> None:
    # Not `write_text`: the kernel takes or refuses a value with the one call that writes it.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


# Trying whether control groups can be created here, and whether their limits hold.


def chosen_place(setting: str) -> tuple[GroupPlace | None, str]:
    """Find a place for control groups whose limits hold, and return why a limit is missing.

    Args:
        setting: `auto`, `off` or a directory, as in `SandboxConfig.cgroup`.

    Raises:
        ConfigError: The named directory does not limit memory and processes.
    """
    if setting == "off":
        return None, "it is switched off"
    folder = None if setting == "auto" else setting
    place, reason = _tried_place(folder)
    if folder is not None and place.controllers != frozenset(CONTROLLERS):
        raise ConfigError(
            f"sandbox.cgroup={folder}: {reason}. It has to be a directory of version 2 that this "
            "account may write to, without processes of its own and with memory and pids in its "
            "cgroup.subtree_control (systemd: Delegate=yes); or choose auto or off"
        )
    return (place if place.controllers else None), reason


def group_words(place: GroupPlace | None, reason: str) -> str:
    """Return a description of `chosen_place`'s result, to follow the words `control group`."""
    if place is None:
        return f"no: {reason}"
    return place.sentence() + (f"; {reason}" if reason else "")


@cache
def _tried_place(folder: str | None) -> tuple[GroupPlace, str]:
    # Takes a quarter of a second, so it is done once in a process.
    found, missing = find_place(folder)
    place, failed = seen_to_hold(found)
    return place, "; ".join(reason for reason in (missing, failed) if reason)


def seen_to_hold(place: GroupPlace) -> tuple[GroupPlace, str]:
    """Return the place with only the limits that hold, and why the others do not."""
    held, reasons = set(), []
    for name, code in _TRIALS.items():
        if name not in place.controllers:
            continue
        try:
            failure = _try(place.only(frozenset({name})), code)
        except (OSError, subprocess.SubprocessError) as error:
            failure = str(error)
        if failure:
            reasons.append(f"{name} does not hold: {failure}")
        else:
            held.add(name)
    return place.only(frozenset(held)), "; ".join(reasons)


_TRIAL_MEMORY, _TRIAL_PROCESSES = 48 << 20, 4
_HELD, _NOT_HELD = 7, 8
_TRIALS = {
    "memory": f"sys.stdin.read(1); x = bytearray({4 * _TRIAL_MEMORY}); x[::4096] = "
    f"bytes([1]) * len(x[::4096]); sys.exit({_NOT_HELD})",
    "pids": "sys.stdin.read(1)\ntry:\n"
    f"    for _ in range({4 * _TRIAL_PROCESSES}): _thread.start_new_thread(time.sleep, (60,))\n"
    f"except RuntimeError: os._exit({_HELD})\nos._exit({_NOT_HELD})",
}


def _try(place: GroupPlace, code: str) -> str:
    """Return why a limit does not hold; empty if it holds."""
    group = ControlGroup(place)
    try:
        group.set_limits(_TRIAL_MEMORY, _TRIAL_PROCESSES)
        program = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"import _thread, os, sys, time\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        with program:
            try:
                group.take(program.pid)
                program.communicate(b"x", timeout=30)
            finally:
                program.kill()
        ended = program.returncode
        if "memory" in place.controllers:
            is_held = ended == -signal.SIGKILL and group.num_killed() == 1
        else:
            is_held = ended == _HELD
        return "" if is_held else f"a program that takes too much ended with {ended}"
    finally:
        group.end()

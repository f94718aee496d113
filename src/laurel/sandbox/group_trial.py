"""Tries whether control groups can be created here, and whether their limits hold."""

from __future__ import annotations

import signal
import subprocess
from functools import cache

from laurel.errors import ConfigError
from laurel.sandbox.control_group import CONTROLLERS, ControlGroup, GroupPlace, find_place
from laurel.sandbox.zygote_process import own_interpreter


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
    place, failed = seen_to_hold(found, own_interpreter())
    return place, "; ".join(reason for reason in (missing, failed) if reason)


def seen_to_hold(place: GroupPlace, interpreter: str) -> tuple[GroupPlace, str]:
    """Return the place with only the limits that hold, and why the others do not."""
    held, reasons = set(), []
    for name, code in _TRIALS.items():
        if name not in place.controllers:
            continue
        try:
            failure = _try(place.only(frozenset({name})), interpreter, code)
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


def _try(place: GroupPlace, interpreter: str, code: str) -> str:
    """Return why a limit does not hold; empty if it holds."""
    group = ControlGroup(place)
    try:
        group.set_limits(_TRIAL_MEMORY, _TRIAL_PROCESSES)
        program = subprocess.Popen(
            [interpreter, "-I", "-S", "-c", f"import _thread, os, sys, time\n{code}"],
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

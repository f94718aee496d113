"""Finds the tier that this machine supports: the best one in which no canary escapes.

Canaries are short hostile programs, which must not reach a small world made for them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from laurel.extensions.code.sandbox.grading import grade
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, SandboxResult, Status
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.extensions.code.sandbox.zygote_process import (
    BoundedZygote,
    SandboxLateError,
    SandboxLostError,
    ZygoteProcess,
)
from laurel.sandbox.inside_process import SandboxStartError
from laurel.sandbox.scratch import ScratchFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The tier that this machine supports, and the evidence for it."""

    tier: Tier | None
    """The tier; None if no program can run here at all."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The reason why each layer is missing or did not hold, and other remarks."""
    sightings: tuple[Sighting, ...] = ()
    """The results of the canaries in this tier."""

    def sentence(self) -> str:
        """Return a description of the result in one line, for logs."""
        if self.tier is None:
            return f"no sandbox: {'; '.join(self.reasons.values())}"
        line = self.tier.sentence(self.reasons)
        notes = [self.reasons[name] for name in ("account", "files") if name in self.reasons]
        return line + "".join(f" Note: {note}." for note in notes)


def detect(
    *,
    without: frozenset[str] = frozenset(),
    interpreter: str | None = None,
    scratch: str | None = None,
) -> Detection:
    """Find the best tier in which no canary escapes.

    Args:
        without: The layers to leave out, to see what holds without them.
        interpreter: The Python that runs programs; by default the one that runs this.
        scratch: The directory for temporary directories; by default the system's.
    """
    if sys.platform != "linux":
        return Detection(
            tier=None, reasons={"system": f"it needs Linux, and this is {sys.platform}"}
        )
    wanted = frozenset(LAYERS) - without
    reasons: dict[str, str] = dict.fromkeys(without, "it is switched off")
    while True:
        zygote = ZygoteProcess(wanted, interpreter=interpreter, scratch=scratch)
        try:
            zygote.start()
            tier = Tier.of(zygote.layers)
            reasons = {**zygote.reasons, **reasons}
            if zygote.layers != tier.layers:  # try it as it will be used
                wanted = tier.layers
                continue
            claims = claims_of(tier)
            with small_world() as world:
                sightings = tuple(
                    try_canary(canary, zygote, world)
                    for canary in CANARIES
                    if canary.claim in claims
                )
        except (SandboxStartError, SandboxLostError) as error:
            if not wanted:
                return Detection(tier=None, reasons={**reasons, "sandbox": str(error)})
            reasons |= dict.fromkeys(wanted, f"it did not work when it was tried: {error}")
            wanted = frozenset()
            continue
        finally:
            zygote.close()
        escaped = [one for one in sightings if not one.held]
        if not escaped:
            return Detection(tier=tier, reasons=reasons, sightings=sightings)
        why = f"'{escaped[0].canary.name}': {escaped[0].detail}"
        if tier is Tier.LIMITS_ONLY:
            return Detection(tier=None, reasons={**reasons, "limits": why}, sightings=sightings)
        # The layers are there and do not hold, so none of them is relied on.
        reasons |= dict.fromkeys(tier.layers, f"it did not hold: {why}")
        wanted = frozenset()


# The canaries.

Claim = Literal["files", "disk", "network", "processes", "time", "memory", "output"]
_ALWAYS: tuple[Claim, ...] = ("time", "memory", "output")
_ESCAPED = "ESCAPED"
_LIMITS = Limits(cpu_s=2, wall_s=60)
_LATE_SECONDS = 10.0
"""The wall time of a canary that had not started within its own."""
_RIGHTS = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def claims_of(tier: Tier) -> frozenset[Claim]:
    """Return what a tier claims to protect."""
    claims: set[Claim] = {*_ALWAYS}
    if "seccomp" in tier.layers:
        claims |= {"network", "processes"}
    if tier.layers & {"namespaces", "landlock"}:
        claims |= {"files", "disk"}
    return frozenset(claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class EscapeAttempt:
    """A program that tries one escape, and prints `ESCAPED` if it succeeds.

    Args:
        name: A description of the attempt.
        claim: The claim of a tier that the program tests.
        code: The program, with the names of `World.facts` in braces.
        limits: The limits, which are small because the program runs whenever a pool is opened.
        statuses: The statuses with which the program may end.
    """

    name: str
    claim: Claim
    code: str
    limits: Limits = _LIMITS
    statuses: frozenset[Status] = frozenset({Status.OK})


@dataclass(frozen=True, slots=True)
class Sighting:
    """The result of running a canary."""

    canary: EscapeAttempt
    held: bool
    detail: str


def _tries(name: str, claim: Claim, attempt: str, imports: str = "os, socket") -> EscapeAttempt:
    body = "".join(f"    {line}\n" for line in attempt.splitlines())
    code = f"import {imports}\ntry:\n{body}    print('{_ESCAPED}')\nexcept OSError as error:\n"
    return EscapeAttempt(name=name, claim=claim, code=code + "    print('blocked', error)\n")


CANARIES: tuple[EscapeAttempt, ...] = (
    _tries("read a file of the machine", "files", "open({secret}).read()"),
    _tries(
        "read a file through a link", "files", "os.symlink({secret}, 'link')\nopen('link').read()"
    ),
    _tries("read the machine's accounts", "files", "assert 'root:' in open('/etc/shadow').read()"),
    _tries(
        "read what another process was started with", "files", "open('/proc/{pid}/cmdline').read()"
    ),
    _tries("write a file of the machine", "files", "open({drop}, 'w').write('x')"),
    _tries("change the rights of a file of the machine", "files", "os.chmod({secret}, 0o777)"),
    _tries("change Python itself", "files", "open(os.__file__, 'a').write('')"),
    EscapeAttempt(
        name="fill the disk",
        claim="disk",
        limits=Limits(cpu_s=2, wall_s=60, disk_mb=1),
        code="for n in range(4): open(str(n), 'wb').write(bytes(1 << 19))\nprint('ESCAPED')",
        statuses=frozenset({Status.DISK_LIMIT, Status.FORBIDDEN}),
    ),
    _tries(
        "connect to a server of the machine",
        "network",
        "socket.create_connection(('127.0.0.1', {port}), 1)",
    ),
    _tries(
        "send a datagram",
        "network",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    ),
    _tries(
        "reach a socket by its abstract name",
        "network",
        "socket.socket(socket.AF_UNIX).connect({name})",
    ),
    _tries("start a process", "processes", "if os.fork() == 0: os._exit(0)"),
    _tries("run another program", "processes", "os.execv('/bin/true', ['true'])"),
    _tries("signal the process that started it", "processes", "os.kill({pid}, 0)"),
    EscapeAttempt(
        name="sleep for ever",
        claim="time",
        code="import time\ntime.sleep(1000)",
        limits=Limits(cpu_s=2, wall_s=0.5),
        statuses=frozenset({Status.TIMEOUT_WALL}),
    ),
    EscapeAttempt(
        name="compute for ever",
        claim="time",
        code="while True: pass",
        limits=Limits(cpu_s=1, wall_s=60),
        statuses=frozenset({Status.TIMEOUT_CPU}),
    ),
    EscapeAttempt(
        name="take all memory",
        claim="memory",
        code="x = bytearray(8 << 30)",
        statuses=frozenset({Status.MEMORY_LIMIT}),
    ),
    EscapeAttempt(
        name="print for ever",
        claim="output",
        code="while True: print('x' * 1000)",
        statuses=frozenset({Status.OUTPUT_LIMIT}),
    ),
)


class World:
    """What canaries try to reach: a secret, a writable directory, and servers."""

    def __init__(self, directory: str) -> None:
        self._secret = os.path.join(directory, "secret")
        self._drop = os.path.join(directory, "drop")
        with open(self._secret, "w") as file:
            file.write("secret")
        # Any account may read and write here: only the sandbox is to prevent it.
        os.chmod(self._secret, _RIGHTS)
        os.chmod(directory, 0o777)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._port = self._server.getsockname()[1]
        self._datagrams.bind(("127.0.0.1", self._port))
        self._named = socket.socket(socket.AF_UNIX)
        self._name = f"\0laurel-canary-{secrets.token_hex(8)}"
        self._named.bind(self._name)
        self._named.listen()
        for listening in (self._server, self._datagrams, self._named):
            listening.setblocking(False)

    def facts(self) -> dict[str, str]:
        """Return the values that replace names in the code of canaries, as Python literals."""
        return {
            "secret": repr(self._secret),
            "drop": repr(self._drop),
            "port": str(self._port),
            "name": repr(self._name),
            "pid": str(os.getpid()),
        }

    def noticed(self) -> str:
        """Describe what canaries have reached since the last call; empty if nothing."""
        seen = []
        for listening, what in ((self._server, "a connection"), (self._named, "a named socket")):
            with contextlib.suppress(OSError):
                listening.accept()[0].close()
                seen.append(what)
        with contextlib.suppress(OSError):
            self._datagrams.recv(100)
            seen.append("a datagram")
        if os.path.exists(self._drop):
            os.unlink(self._drop)
            seen.append("a file")
        if stat.S_IMODE(os.stat(self._secret).st_mode) != _RIGHTS:
            os.chmod(self._secret, _RIGHTS)
            seen.append("a file with other rights")
        return ", ".join(seen)

    def close(self) -> None:
        """Close the servers."""
        for listening in (self._server, self._datagrams, self._named):
            listening.close()


@contextlib.contextmanager
def small_world() -> Iterator[World]:
    """Create a world in a temporary directory."""
    with ScratchFolder("canaries") as folder:
        world = World(str(folder.path))
        try:
            yield world
        finally:
            world.close()


def try_canary(canary: EscapeAttempt, zygote: ZygoteProcess, world: World) -> Sighting:
    """Run one canary; raise `SandboxLostError` if the sandbox itself fails."""
    code = canary.code
    for name, value in world.facts().items():
        code = code.replace(f"{{{name}}}", value)
    try:
        result = _graded(code, canary.limits, zygote)
    except SandboxLateError:  # a loaded machine is slow, and no worse a sandbox for it
        result = _graded(code, replace(canary.limits, wall_s=_LATE_SECONDS), zygote)
    outside = world.noticed()
    if outside:
        return Sighting(canary, False, f"outside there was {outside}")
    if _ESCAPED in result.stdout:
        return Sighting(canary, False, "it succeeded")
    if result.status not in canary.statuses:
        return Sighting(canary, False, f"it ended with {result.status.value}: {_last(result)}")
    return Sighting(canary, True, _last(result) or result.status.value)


def _graded(code: str, limits: Limits, zygote: ZygoteProcess) -> SandboxResult:
    job = SandboxJob(code=code, limits=limits)
    return grade(job, BoundedZygote(zygote, None), tier="", attempt=1)


def _last(result: SandboxResult) -> str:
    lines = (result.stderr or result.stdout[:500]).strip().splitlines()
    return lines[-1][:200] if lines and result.status is not Status.OUTPUT_LIMIT else ""

"""Hostile programs, run in a tier and judged. Also a program, for accounts and containers that
the tests themselves do not run in:

    python tests/hostile_suite.py --without namespaces [--like-docker]

It imports nothing but the standard library and the sandbox.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import struct
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from laurel.extensions.code.sandbox.detection import World, claims_of, detect, small_world
from laurel.extensions.code.sandbox.grading import grade
from laurel.extensions.code.sandbox.jobs import CallTest, Limits, SandboxJob, SandboxResult
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.sandbox.zygote_process import ZygoteProcess
from laurel.sandbox.inside import kernel

PROGRAMS = Path(__file__).parent / "faults" / "hostile"
ESCAPED = "ESCAPED"
PATIENT = Limits(wall_s=120)
"""For a machine that is busy with other things."""
CALLS = (((2, 3), 5), ((10, -4), 6), ((734000, 261), 734261))
TEST_CODE = "def check(candidate):\n" + "".join(
    f"    assert candidate{args} == {value}\n" for args, value in CALLS
)


@dataclass(frozen=True)
class Program:
    """A hostile or honest program and what its header says.

    `claim` is what has to hold it (see `canaries.claims_of`), `verdict` the statuses that it may
    end with, `stdout` and `stderr` what has to be in them.
    """

    name: str
    code: str
    claim: str
    verdict: frozenset[str]
    mode: str = "script"
    limits: Limits = field(default_factory=lambda: PATIENT)
    stdout: str = ""
    stderr: str = ""

    def runs_in(self, tier: Tier) -> bool:
        return self.claim in claims_of(tier)


def read_program(path: Path) -> Program:
    code = path.read_text(encoding="utf-8")
    header = {}
    for line in code.splitlines():
        if not line.startswith("# ") or ": " not in line:
            break
        key, _, value = line[2:].partition(": ")
        header[key] = value
    limits = dict(one.split("=") for one in header.get("limits", "").split())
    return Program(
        name=path.stem,
        code=code,
        claim=header["claim"],
        verdict=frozenset(header["verdict"].split(", ")),
        mode=header.get("mode", "script"),
        limits=replace(PATIENT, **{key: json.loads(value) for key, value in limits.items()}),
        stdout=header.get("stdout", ""),
        stderr=header.get("stderr", ""),
    )


def read_programs() -> list[Program]:
    return [read_program(path) for path in sorted(PROGRAMS.glob("*.txt"))]


def job_of(program: Program, world: World) -> SandboxJob:
    code = program.code
    for name, value in world.facts().items():
        code = code.replace(f"{{{name}}}", value)
    tests = [CallTest(args=args, expected=value) for args, value in CALLS]
    return SandboxJob(
        id=program.name,
        code=code,
        mode=program.mode,
        entry="add",
        tests=tests if program.mode == "call" else (),
        test_code=f"{TEST_CODE}check(add)\n",
        limits=program.limits,
    )


def fault_in(program: Program, zygote: ZygoteProcess, world: World) -> str:
    """What went wrong; empty where the program was held and has its verdict."""
    result = grade(job_of(program, world), zygote, tier="", attempt=1)
    if outside := world.noticed():
        return f"outside there was {outside}"
    return _fault_of(program, result)


def _fault_of(program: Program, result: SandboxResult) -> str:
    said = f"{result.stdout[-300:]!r} {result.stderr[-500:]!r} {result.tests}"
    if ESCAPED in result.stdout:
        return f"it got out: {said}"
    if result.status.value not in program.verdict:
        return f"{result.status.value}, not {sorted(program.verdict)}: {said}"
    if program.stdout not in result.stdout or program.stderr not in result.stderr:
        return f"it did not print what it should: {said}"
    return ""


def be_like_docker() -> None:
    """Refuse what Docker's default profile refuses a container without extra rights."""
    column = kernel.machine()
    assert column is not None
    refused = {
        "mount": (165, 40),
        "umount2": (166, 39),
        "unshare": (272, 97),
        "setns": (308, 268),
        "pivot_root": (155, 41),
        "mount_setattr": (442, 442),
    }
    clone = (56, 220)[column]
    new_namespaces = 0x7E020000
    program = [
        struct.pack("HBBI", 0x20, 0, 0, 0),
        *_when(435, [struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.ENOSYS)]),
    ]
    deny = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM)
    for numbers in refused.values():
        program += _when(numbers[column], [deny])
    program += [
        struct.pack("HBBI", 0x15, 0, 4, clone),
        struct.pack("HBBI", 0x20, 0, 0, 16),
        struct.pack("HBBI", 0x54, 0, 0, new_namespaces),
        struct.pack("HBBI", 0x15, 1, 0, 0),
        deny,
        struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    kernel.call("seccomp", 1, 0, header)


def _when(number: int, code: list[bytes]) -> list[bytes]:
    return [struct.pack("HBBI", 0x15, 0, len(code), number), *code]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--without", nargs="*", default=[])
    options.add_argument("--like-docker", action="store_true")
    options.add_argument("--only", nargs="*", default=[])
    chosen = options.parse_args()
    if chosen.like_docker:
        be_like_docker()
    found = detect(without=frozenset(chosen.without))
    faults: dict[str, str] = {}
    count = 0
    if found.tier is not None:
        zygote = ZygoteProcess(found.tier.layers)
        try:
            with small_world() as world:
                for program in read_programs():
                    if program.runs_in(found.tier) and (
                        not chosen.only or program.name in chosen.only
                    ):
                        count += 1
                        if fault := fault_in(program, zygote, world):
                            faults[program.name] = fault
        finally:
            zygote.close()
    said = {
        "tier": found.tier.value if found.tier else None,
        "reasons": dict(found.reasons),
        "programs": count,
        "faults": faults,
    }
    json.dump(said, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

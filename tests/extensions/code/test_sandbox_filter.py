"""The list of system calls, as the kernel's filter would decide it, on both machines."""

import ast
import errno
import signal
import struct
import sys
from pathlib import Path

import pytest

from laurel.extensions.code.sandbox import inside as inside_of_programs
from laurel.extensions.code.sandbox.inside.meter import ASKED, REFUSED
from laurel.extensions.importing import inside as inside_of_scripts
from laurel.sandbox import inside
from laurel.sandbox.inside.seccomp import (
    ON_FOREIGN_FILES,
    _search,
    filter_program,
    meter_program,
    prepared,
)
from laurel.sandbox.inside.syscall_numbers import (
    ALLOWED,
    CHECKED,
    CLONE3,
    PROCESSES,
    UNSUPPORTED,
)

ARCHITECTURE = (0xC000003E, 0xC00000B7)
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PID = 42


def decide(column, number, *arguments, architecture=None, without=frozenset()):
    """Interpret the filter as the kernel does."""
    return path(column, number, *arguments, architecture=architecture, without=without)[-1]


def path(column, number, *arguments, architecture=None, without=frozenset()):
    """The values of the instructions that are executed; the last is the decision."""
    words = {0: number, 4: ARCHITECTURE[column] if architecture is None else architecture}
    for index, value in enumerate(arguments):
        words[16 + 8 * index] = value & 0xFFFFFFFF
    return interpret(filter_program(column, PID, without=without), words)


def interpret(instructions, words):
    program = [struct.unpack("HBBI", one) for one in instructions]
    position, accumulator = 0, 0
    values = []
    while True:
        code, if_true, if_false, value = program[position]
        values.append(value)
        position += 1
        if code == 0x20:
            accumulator = words.get(value, 0)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return values
        elif code == 0x05:
            position += value
        else:
            holds = accumulator == value if code == 0x15 else accumulator >= value
            position += if_true if holds else if_false


@pytest.fixture(params=[0, 1], ids=["x86_64", "aarch64"])
def column(request):
    return request.param


def test_exactly_the_listed_calls_are_allowed(column):
    listed = {numbers[column] for numbers in ALLOWED.values()} - {None}
    checked = {numbers[column] for numbers in CHECKED.values()}
    for number in range(600):
        if number in checked:
            continue
        expected = ALLOW if number in listed else ENOSYS if number == CLONE3[column] else EPERM
        if number in {numbers[column] for numbers in UNSUPPORTED.values()}:
            expected = 0x50000 | errno.ENOTSUP
        assert decide(column, number) == expected, number


def test_a_shell_may_start_processes_and_nothing_else_more(column):
    program = filter_program(column, PID, without=ON_FOREIGN_FILES, has_processes=True)
    asked = [*CHECKED.values(), *UNSUPPORTED.values()]
    skipped = {numbers[column] for numbers in asked} | {CLONE3[column]}
    allowed = {ALLOWED[name][column] for name in ALLOWED.keys() - ON_FOREIGN_FILES}
    allowed |= {numbers[column] for numbers in PROCESSES.values()}
    for number in set(range(600)) - skipped:
        decision = interpret(program, {0: number, 4: ARCHITECTURE[column]})[-1]
        assert decision == (ALLOW if number in allowed else EPERM), number
    clone = {0: CHECKED["clone"][column], 4: ARCHITECTURE[column]}
    assert interpret(program, {**clone, 16: signal.SIGCHLD})[-1] == ALLOW
    for namespace in (0x20000, *(1 << bit for bit in range(25, 31))):
        assert interpret(program, {**clone, 16: namespace | signal.SIGCHLD})[-1] == EPERM


def test_a_decision_takes_few_comparisons(column):
    """The kernel goes through the filter for every number whenever it is installed."""
    checked = {numbers[column] for numbers in CHECKED.values()}
    steps = [len(path(column, number)) for number in range(600) if number not in checked]
    assert max(steps) <= 5 + 8 + 1  # what comes first, a search in at most 2**8 ranges, the answer


def test_a_search_may_be_longer_than_a_comparison_can_jump():
    """Each of 300 numbers has an answer of its own, behind instructions that do nothing."""
    nothing = struct.pack("HBBI", 0x54, 0, 0, 0xFFFFFFFF)
    ranges = [(n, [nothing] * 3 + [struct.pack("HBBI", 0x06, 0, 0, 1000 + n)]) for n in range(300)]
    load = struct.pack("HBBI", 0x20, 0, 0, 0)
    code = [load, *_search(ranges)]
    assert len(code) > 4 * 256
    assert [interpret(code, {0: n})[-1] for n in range(310)] == [
        1000 + min(n, 299) for n in range(310)
    ]


def test_no_number_is_listed_twice(column):
    numbers = [one[column] for one in [*ALLOWED.values(), *CHECKED.values()]]
    known = [number for number in numbers if number is not None]
    assert len(known) == len(set(known))


def test_other_numbers_for_the_same_calls_are_fatal(column):
    assert decide(column, 0x40000000 | 39) == KILL
    assert decide(column, 0, architecture=0x40000003) == KILL
    assert decide(column, 0, architecture=ARCHITECTURE[1 - column]) == KILL


def test_some_calls_are_refused_where_the_root_is_not_its_own(column):
    for name in ON_FOREIGN_FILES:
        number = ALLOWED[name][column]
        if number is not None:
            assert decide(column, number, without=ON_FOREIGN_FILES) == EPERM
    assert decide(column, ALLOWED["openat"][column], without=ON_FOREIGN_FILES) == ALLOW


THREAD = 0x3D0F00
"""Flags with which the C library makes a thread."""


@pytest.mark.parametrize(
    ("name", "arguments", "decision"),
    [
        ("clone", (THREAD,), ALLOW),
        ("clone", (17,), EPERM),
        ("clone", (0x4100,), EPERM),
        ("clone", (THREAD | 0x10000000,), EPERM),
        ("clone", (THREAD | 0x80,), EPERM),
        ("clone", (THREAD | 0x00020000,), EPERM),
        ("clone", (0x10000,), EPERM),
        ("clone", (THREAD & ~0x400,), EPERM),
        ("clone", (THREAD & ~0x200,), EPERM),
        ("close_range", (3, 9, 0), ALLOW),
        ("close_range", (3, 9, 4), ALLOW),
        ("close_range", (3, 9, 2), EPERM),
        ("kill", (PID, 9), ALLOW),
        ("kill", (-1, 9), EPERM),
        ("kill", (0, 9), EPERM),
        ("kill", (1, 9), EPERM),
        ("kill", (-PID, 9), EPERM),
        ("tgkill", (PID, 43, 9), ALLOW),
        ("tgkill", (1, 1, 9), EPERM),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (PID, 7), ALLOW),
        ("prlimit64", (1, 7), EPERM),
        ("ioctl", (1, 0x5401), ALLOW),
        ("ioctl", (1, 0x5412), EPERM),
        ("ioctl", (1, 0x8901), EPERM),
        ("fcntl", (1, 3), ALLOW),
        ("fcntl", (1, 1030), ALLOW),
        ("fcntl", (1, 8), EPERM),
        ("fcntl", (1, 10), EPERM),
        ("fcntl", (1, 15), EPERM),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0x80000), ALLOW),
        ("socketpair", (1, 2), EPERM),
        ("socketpair", (2, 1), EPERM),
        ("socketpair", (1, 5), EPERM),
        ("prctl", (15,), ALLOW),
        ("prctl", (1, 0), EPERM),
        ("prctl", (4, 1), EPERM),
    ],
)
def test_calls_whose_arguments_count(column, name, arguments, decision):
    assert decide(column, CHECKED[name][column], *arguments) == decision


ASK = 0x7FC00000
CREATE, TEMPORARY, APPEND = 0o100, 0o20200000, 0o2000


def test_growing_files_is_asked_for_and_reading_them_is_not(column):
    def meter(name, *arguments):
        words = {0: ALLOWED[name][column]}
        words |= {16 + 8 * index: value for index, value in enumerate(arguments)}
        return interpret(meter_program(column, ASKED), words)[-1]

    here = {name for name in ASKED if ALLOWED[name][column] is not None}
    assert {meter(name) for name in here - {"open", "openat"}} == {ASK}
    assert [meter("openat", 0, 0, flags) for flags in (0, 1, APPEND)] == [ALLOW] * 3
    assert [meter("openat", 0, 0, 1 | flags) for flags in (CREATE, TEMPORARY)] == [ASK] * 2
    assert {meter(name) for name in ("read", "pread64", "unlinkat", "renameat", "futex")} == {ALLOW}
    shared, private, anonymous = 1, 2, 0x20
    kinds = (private, shared | anonymous, private | anonymous, 0x4022)
    assert {meter("mmap", 0, 9, 3, kind) for kind in kinds} == {ALLOW}
    assert {meter("mmap", 0, 9, 3, kind) for kind in (shared, 3, 0x8001)} == {EPERM}
    assert {ALLOWED[name][column] for name in REFUSED} - {None}  # calls that exist


def test_nothing_but_the_standard_library_is_imported_inside():
    ours = (inside, inside_of_programs, inside_of_scripts)
    for path in [path for one in ours for path in Path(one.__file__).parent.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                assert (
                    name.startswith(tuple(one.__name__ for one in ours))
                    or name.split(".")[0] in sys.stdlib_module_names
                ), f"{path.name} imports {name}"


def test_the_prepared_filter_is_the_one_for_the_process(column):
    for without in (frozenset(), ON_FOREIGN_FILES, REFUSED):
        instructions, places = prepared(column, without)
        code = bytearray(instructions)
        for place in places:
            struct.pack_into("I", code, place, 123_456)
        assert bytes(code) == b"".join(filter_program(column, 123_456, without=without))
        assert len(places) == 3

"""Filters the system calls of a program in the kernel, by a list of those allowed."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from dataclasses import dataclass

from laurel.sandbox.inside import kernel
from laurel.sandbox.inside.syscall_numbers import (
    ALLOWED,
    CHECKED,
    CLONE3,
    PROCESSES,
    UNSUPPORTED,
)

# By the column of `syscall_numbers`.
_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOAD, _AND, _JUMP, _JUMP_IF_EQUAL, _JUMP_IF_NOT_LESS = 0x20, 0x54, 0x05, 0x15, 0x35
_RETURN = 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8

# Flags of the C library's threads: they share memory, directory and open files, and are of the same
# process. With open files of its own a thread could hide what it keeps open.
_THREAD = 0x00000100 | 0x00000200 | 0x00000400 | 0x00010000
_MAKES_A_FILE = 0o100 | 0o20000000  # flags of `open`: O_CREAT, O_TMPFILE
_ANONYMOUS, _PRIVATE, _KINDS_OF_MAPS = 0x20, 0x02, 0x0F
_NEW_NAMESPACES = 0x7E020000 | 0x00000080
_SELF = -1  # stands for the number of the confined process


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition that the low half of an argument, masked, is one of some values.

    The kernel uses only 32 bits of such arguments, or their upper half has no meaning.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


_CONDITIONS: dict[str, tuple[_Condition, ...]] = {
    "clone": (_Condition(0, (_THREAD,), mask=_THREAD | _NEW_NAMESPACES),),
    "kill": (_Condition(0, (_SELF,)),),
    "tgkill": (_Condition(0, (_SELF,)),),
    # Its own limits; a hard limit cannot be raised.
    "prlimit64": (_Condition(0, (0, _SELF)),),
    # Terminal and its size, readable bytes, (non-)blocking, close on exec.
    "ioctl": (_Condition(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # Not F_SETOWN and F_SETSIG: with those the kernel sends any signal to any process.
    "fcntl": (_Condition(1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),),
    # A stream between its own threads. A datagram socket could be aimed at a neighbour's name.
    "socketpair": (_Condition(0, (1,)), _Condition(1, (1,), mask=0xF)),
    # Its own name.
    "prctl": (_Condition(0, (15, 16)),),
    # Not with a table of open files of its own, as for `_THREAD`.
    "close_range": (_Condition(2, (0,), mask=0x2),),
}
_NO_NEW_NAMESPACES = _Condition(0, (0,), mask=_NEW_NAMESPACES & ~0xFF)
# Calls that need no notification if the condition holds.
_UNMETERED: dict[str, _Condition] = {
    "open": _Condition(1, (0,), mask=_MAKES_A_FILE),
    "openat": _Condition(2, (0,), mask=_MAKES_A_FILE),
}
# For `mmap`: a file that is written as memory would grow without a call.
_NO_SHARED_FILE = _Condition(
    3, (_PRIVATE, *range(_ANONYMOUS, 2 * _ANONYMOUS - 16)), mask=_ANONYMOUS | _KINDS_OF_MAPS
)


ON_FOREIGN_FILES = frozenset(
    {"chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat", "truncate"}
)
"""The calls that Landlock does not stop, or in the last case did not always stop.

If the root directory is the machine's, the owner of a file could use them on it. They are refused
unless a `Meter` makes them instead.
"""


def install(pid: int, *, without: frozenset[str] = frozenset()) -> None:
    """Filter the system calls of this process and its future threads permanently.

    Args:
        pid: The number of this process in its namespace, the only one to which it may send signals.
        without: Further system calls to refuse.

    Raises:
        OSError: The kernel refused.
    """
    column = kernel.machine()
    if column is None:
        raise OSError(errno.ENOSYS, "no system call numbers for this machine")
    instructions, places = prepared(column, without)
    code = bytearray(instructions)
    for place in places:
        struct.pack_into("I", code, place, pid)
    _load(bytes(code), 0)


def install_meter(asked: frozenset[str]) -> int:
    """Make the kernel ask about this process's calls on files; return the descriptor for answers.

    This also covers future threads, and cannot be undone. The holder of the descriptor answers.
    Call this before `install`.

    Args:
        asked: The names of the calls.

    Raises:
        OSError: The kernel refused, because it is too old, or asks another process already.
    """
    column = kernel.machine()
    if column is None:
        raise OSError(errno.ENOSYS, "no system call numbers for this machine")
    return _load(b"".join(meter_program(column, asked)), _NEW_LISTENER)


def _load(instructions: bytes, flags: int) -> int:
    code = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    return kernel.call("seccomp", _SET_MODE_FILTER, flags, header)


@functools.cache
def prepared(column: int, without: frozenset[str]) -> tuple[bytes, tuple[int, ...]]:
    """Return the instructions of the filter, and the offsets of the process number in them.

    The zygote creates them once for all processes that it forks.

    Args:
        column: The column of this machine in `syscall_numbers`.
    """
    one, other = (b"".join(filter_program(column, pid, without=without)) for pid in (1, 2))
    return one, tuple(place for place in range(4, len(one), 8) if one[place] != other[place])


def install_for_processes() -> None:
    """Filter the system calls of this process and of those that it starts permanently.

    They may start processes and programs, and the filter keeps them in the group of this process,
    so that all of them can be killed. Otherwise it allows what `install` does, but for the calls on
    files that Landlock does not stop.

    Raises:
        OSError: The kernel refused.
    """
    column = kernel.machine()
    if column is None:
        raise OSError(errno.ENOSYS, "no system call numbers for this machine")
    program = filter_program(column, os.getpid(), without=ON_FOREIGN_FILES, has_processes=True)
    _load(b"".join(program), 0)


def filter_program(
    column: int, pid: int, *, without: frozenset[str] = frozenset(), has_processes: bool = False
) -> list[bytes]:
    """Return the instructions of the filter, 8 bytes each.

    Args:
        has_processes: Whether to allow the calls in `PROCESSES`, and forks.
    """
    actions = {CLONE3[column]: [_instruction(_RETURN, _ERRNO | errno.ENOSYS)]}
    for unsupported in UNSUPPORTED.values():
        actions[unsupported[column]] = [_instruction(_RETURN, _ERRNO | errno.ENOTSUP)]
    for name, numbers in CHECKED.items():
        number = numbers[column]
        if number is not None:
            is_fork = has_processes and name == "clone"
            actions[number] = _check((_NO_NEW_NAMESPACES,) if is_fork else _CONDITIONS[name], pid)
    for name, numbers in {**ALLOWED, **(PROCESSES if has_processes else {})}.items():
        number = numbers[column]
        if number is not None and name not in without:
            actions[number] = [_instruction(_RETURN, _ALLOW)]
    return [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCHITECTURES[column], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER_AT),
        # A second set of numbers for the same calls, which the list below does not cover.
        _instruction(_JUMP_IF_NOT_LESS, _X32_BIT, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
        *_search(_ranges(actions, _REFUSE)),
    ]


@functools.cache
def meter_program(column: int, asked: frozenset[str]) -> list[bytes]:
    """Return the instructions of the filter that makes the kernel ask about calls on files.

    `filter_program` may still refuse calls that this filter allows, including other numbers of the
    same calls.
    """
    ask, pass_on = [_instruction(_RETURN, _ASK)], [_instruction(_RETURN, _ALLOW)]
    actions = {ALLOWED["mmap"][column]: _check((_NO_SHARED_FILE,), 0)}
    for name in asked:
        if (number := ALLOWED[name][column]) is not None:
            unless = _UNMETERED.get(name)
            actions[number] = ask if unless is None else _check((unless,), 0, otherwise=ask)
    known = {number: action for number, action in actions.items() if number is not None}
    return [_instruction(_LOAD, _NUMBER_AT), *_search(_ranges(known, pass_on))]


# First number of a range, and the action for it and those up to the next range.
_Range = tuple[int, list[bytes]]


def _ranges(actions: dict[int, list[bytes]], other: list[bytes]) -> list[_Range]:
    """Return consecutive ranges of all call numbers that have the same action."""
    ranges: list[_Range] = []
    for number in range(max(actions) + 2):
        action = actions.get(number, other)
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _search(ranges: list[_Range]) -> list[bytes]:
    """Return the instructions of a binary search over ranges, which is fast.

    The kernel evaluates the filter for every number when it is installed, which happens for every
    program, and for some numbers at every call.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) < 256:
        return [_instruction(_JUMP_IF_NOT_LESS, first, len(below), 0), *below, *above]
    # The jump of a comparison is limited to 255 instructions.
    jump = _instruction(_JUMP, len(below))
    return [_instruction(_JUMP_IF_NOT_LESS, first, 0, 1), jump, *below, *above]


def _check(
    conditions: tuple[_Condition, ...], pid: int, *, otherwise: list[bytes] | None = None
) -> list[bytes]:
    """Return instructions that allow a call if all conditions hold, and otherwise refuse it.

    `otherwise` replaces the refusal by another action of one instruction.
    """
    code: list[bytes] = []
    for condition in conditions:
        values = [pid if value == _SELF else value for value in condition.values]
        code += [
            _instruction(_LOAD, _ARGUMENTS_AT + 8 * condition.argument),
            _instruction(_AND, condition.mask),
        ]
        for index, value in enumerate(values):
            # Jumps over the other values, and over the other action.
            code.append(_instruction(_JUMP_IF_EQUAL, value, len(values) - index, 0))
        code += _REFUSE if otherwise is None else otherwise
    return [*code, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


_REFUSE = [_instruction(_RETURN, _ERRNO | errno.EPERM)]

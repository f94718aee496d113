"""Which system calls a program may make: a list of those allowed, as a filter in the kernel."""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from dataclasses import dataclass

from laurel.environments.sandbox.inside import kernel
from laurel.environments.sandbox.inside.syscall_numbers import ALLOWED, CHECKED, CLONE3

_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
"""By the column of `syscall_numbers`."""
_X32_BIT = 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP, _JUMP_IF_EQUAL, _JUMP_IF_NOT_LESS = 0x20, 0x54, 0x05, 0x15, 0x35
_RETURN = 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_MODE_FILTER = 1

_THREAD = 0x00000100 | 0x00010000
"""Shares the memory, is of the same process."""
_NEW_NAMESPACES = 0x7E020000 | 0x00000080
_SELF = -1
"""Stands for the number of the process that is confined."""


@dataclass(frozen=True, slots=True)
class _Condition:
    """The low half of an argument, masked, is one of some values. All such arguments are of 32
    bits for the kernel, or their upper half means nothing to it."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


_CONDITIONS: dict[str, tuple[_Condition, ...]] = {
    "clone": (_Condition(0, (_THREAD,), mask=_THREAD | _NEW_NAMESPACES),),
    "kill": (_Condition(0, (_SELF,)),),
    "tgkill": (_Condition(0, (_SELF,)),),
    # Its own; a hard limit cannot be raised.
    "prlimit64": (_Condition(0, (0, _SELF)),),
    # Is it a terminal and how large, how much is there to read, (non-)blocking, close on exec.
    "ioctl": (_Condition(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # Not F_SETOWN and F_SETSIG: with those the kernel sends any signal to anyone.
    "fcntl": (_Condition(1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),),
    # A stream between its own threads. A datagram socket could be aimed at a neighbour's name.
    "socketpair": (_Condition(0, (1,)), _Condition(1, (1,), mask=0xF)),
    # Its name.
    "prctl": (_Condition(0, (15, 16)),),
}


ON_FOREIGN_FILES = frozenset(
    {"chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat", "truncate"}
)
"""What Landlock does not stop (the last: did not always). Where the root is the machine's, the
owner of a file could use them on it."""


def install(pid: int, *, without: frozenset[str] = frozenset()) -> None:
    """Confine this process, threads to come included, for good.

    Args:
        pid: Its number in its own namespace: the only one that it may send signals to.
        without: Calls that are refused besides.

    Raises:
        OSError: The kernel refused.
    """
    column = kernel.machine()
    if column is None:
        raise OSError(errno.ENOSYS, "no system call numbers for this machine")
    instructions, places = prepared(column, without)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    for place in places:
        struct.pack_into("I", code, place, pid)
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    kernel.call("seccomp", _SET_MODE_FILTER, 0, header)


@functools.cache
def prepared(column: int, without: frozenset[str]) -> tuple[bytes, tuple[int, ...]]:
    """The instructions, and where in them the number of the process belongs. Made once, by the
    zygote, for all that it forks.

    Args:
        column: The machine's, in `syscall_numbers`.
        without: See `install`.
    """
    one, other = (b"".join(filter_program(column, pid, without=without)) for pid in (1, 2))
    return one, tuple(place for place in range(4, len(one), 8) if one[place] != other[place])


def filter_program(column: int, pid: int, *, without: frozenset[str] = frozenset()) -> list[bytes]:
    """The instructions, 8 bytes each.

    Args:
        column: The machine's, in `syscall_numbers`.
        pid: See `install`.
        without: See `install`.
    """
    return [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCHITECTURES[column], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER_AT),
        # A second set of numbers for the same calls, which the list below would not see through.
        _instruction(_JUMP_IF_NOT_LESS, _X32_BIT, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
        *_search(_ranges(column, pid, without)),
    ]


_Range = tuple[int, list[bytes]]
"""The first number, and what is done with it and those up to the next range."""


def _ranges(column: int, pid: int, without: frozenset[str]) -> list[_Range]:
    """All numbers, in order; neighbours of one fate together."""
    refuse = [_instruction(_RETURN, _ERRNO | errno.EPERM)]
    fates = {CLONE3[column]: [_instruction(_RETURN, _ERRNO | errno.ENOSYS)]}
    for name, numbers in CHECKED.items():
        number = numbers[column]
        if number is not None:
            fates[number] = _check(_CONDITIONS[name], pid)
    for name, numbers in ALLOWED.items():
        number = numbers[column]
        if number is not None and name not in without:
            fates[number] = [_instruction(_RETURN, _ALLOW)]
    ranges: list[_Range] = []
    for number in range(max(fates) + 2):
        fate = fates.get(number, refuse)
        if not ranges or ranges[-1][1] != fate:
            ranges.append((number, fate))
    return ranges


def _search(ranges: list[_Range]) -> list[bytes]:
    """Half of them are left after each comparison. The kernel tries every number when the filter
    is installed, which is for every program, and some at every call."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) < 256:
        return [_instruction(_JUMP_IF_NOT_LESS, first, len(below), 0), *below, *above]
    # A comparison cannot jump so far.
    jump = _instruction(_JUMP, len(below))
    return [_instruction(_JUMP_IF_NOT_LESS, first, 0, 1), jump, *below, *above]


def _check(conditions: tuple[_Condition, ...], pid: int) -> list[bytes]:
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    code: list[bytes] = []
    for condition in conditions:
        values = [pid if value == _SELF else value for value in condition.values]
        code += [
            _instruction(_LOAD, _ARGUMENTS_AT + 8 * condition.argument),
            _instruction(_AND, condition.mask),
        ]
        for index, value in enumerate(values):
            # Over the other values, and over the refusal.
            code.append(_instruction(_JUMP_IF_EQUAL, value, len(values) - index, 0))
        code.append(refuse)
    return [*code, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)

"""Which system calls a program may make: a list of those allowed, as a filter in the kernel."""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from dataclasses import dataclass

from laurel.sandbox.inside import kernel, meter
from laurel.sandbox.inside.syscall_numbers import ALLOWED, CHECKED, CLONE3, UNSUPPORTED

_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
"""By the column of `syscall_numbers`."""
_X32_BIT = 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOAD, _AND, _JUMP, _JUMP_IF_EQUAL, _JUMP_IF_NOT_LESS = 0x20, 0x54, 0x05, 0x15, 0x35
_RETURN = 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8

_THREAD = 0x00000100 | 0x00000200 | 0x00000400 | 0x00010000
"""Shares memory, directory and open files, is of the same process: as the C library makes them.
With open files of its own it could hide what it keeps open."""
_MAKES_A_FILE = 0o100 | 0o20000000
"""Flags of `open`: O_CREAT, O_TMPFILE."""
_ANONYMOUS, _PRIVATE, _KINDS_OF_MAPS = 0x20, 0x02, 0x0F
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
    # Not with a table of open files of its own: see `_THREAD`.
    "close_range": (_Condition(2, (0,), mask=0x2),),
}
_UNMETERED: dict[str, _Condition] = {
    "open": _Condition(1, (0,), mask=_MAKES_A_FILE),
    "openat": _Condition(2, (0,), mask=_MAKES_A_FILE),
}
"""Where that holds, nobody is asked."""
_NO_SHARED_FILE = _Condition(
    3, (_PRIVATE, *range(_ANONYMOUS, 2 * _ANONYMOUS - 16)), mask=_ANONYMOUS | _KINDS_OF_MAPS
)
"""Of `mmap`: a file that is written as memory grows without a call."""


ON_FOREIGN_FILES = frozenset(
    {"chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat", "truncate"}
)
"""What Landlock does not stop (the last: did not always). Where the root is the machine's, the
owner of a file could use them on it. Refused where no `Meter` does them instead."""


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
    code = bytearray(instructions)
    for place in places:
        struct.pack_into("I", code, place, pid)
    _load(bytes(code), 0)


def install_meter() -> int:
    """Have whoever holds what is returned asked about the calls of this process that concern its
    files, threads to come included, for good: see `meter`. Before `install`.

    Raises:
        OSError: The kernel refused: it is too old, or something outside is asked already.
    """
    column = kernel.machine()
    if column is None:
        raise OSError(errno.ENOSYS, "no system call numbers for this machine")
    return _load(b"".join(meter_program(column)), _NEW_LISTENER)


def _load(instructions: bytes, flags: int) -> int:
    code = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    return kernel.call("seccomp", _SET_MODE_FILTER, flags, header)


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
        *_search(_ranges(_fates(column, pid, without), _REFUSE)),
    ]


@functools.cache
def meter_program(column: int) -> list[bytes]:
    """The instructions of the filter that asks about files. What it lets through, `filter_program`
    may still refuse, other numbers for the same calls among it."""
    ask, pass_on = [_instruction(_RETURN, _ASK)], [_instruction(_RETURN, _ALLOW)]
    fates = {ALLOWED["mmap"][column]: _check((_NO_SHARED_FILE,), 0)}
    for name in meter.ASKED:
        if (number := ALLOWED[name][column]) is not None:
            unless = _UNMETERED.get(name)
            fates[number] = ask if unless is None else _check((unless,), 0, otherwise=ask)
    known = {number: fate for number, fate in fates.items() if number is not None}
    return [_instruction(_LOAD, _NUMBER_AT), *_search(_ranges(known, pass_on))]


_Range = tuple[int, list[bytes]]
"""The first number, and what is done with it and those up to the next range."""


def _fates(column: int, pid: int, without: frozenset[str]) -> dict[int, list[bytes]]:
    """What is done with each number that is not refused."""
    fates = {CLONE3[column]: [_instruction(_RETURN, _ERRNO | errno.ENOSYS)]}
    for unsupported in UNSUPPORTED.values():
        fates[unsupported[column]] = [_instruction(_RETURN, _ERRNO | errno.ENOTSUP)]
    for name, numbers in CHECKED.items():
        number = numbers[column]
        if number is not None:
            fates[number] = _check(_CONDITIONS[name], pid)
    for name, numbers in ALLOWED.items():
        number = numbers[column]
        if number is not None and name not in without:
            fates[number] = [_instruction(_RETURN, _ALLOW)]
    return fates


def _ranges(fates: dict[int, list[bytes]], other: list[bytes]) -> list[_Range]:
    """All numbers, in order; neighbours of one fate together."""
    ranges: list[_Range] = []
    for number in range(max(fates) + 2):
        fate = fates.get(number, other)
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


def _check(
    conditions: tuple[_Condition, ...], pid: int, *, otherwise: list[bytes] | None = None
) -> list[bytes]:
    """Allow a call where all conditions hold, else do something else (one instruction)."""
    code: list[bytes] = []
    for condition in conditions:
        values = [pid if value == _SELF else value for value in condition.values]
        code += [
            _instruction(_LOAD, _ARGUMENTS_AT + 8 * condition.argument),
            _instruction(_AND, condition.mask),
        ]
        for index, value in enumerate(values):
            # Over the other values, and over what is done otherwise.
            code.append(_instruction(_JUMP_IF_EQUAL, value, len(values) - index, 0))
        code += _REFUSE if otherwise is None else otherwise
    return [*code, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


_REFUSE = [_instruction(_RETURN, _ERRNO | errno.EPERM)]

"""Whether a run still goes on, told from outside, without disturbing it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from laurel.observe.run_record import RunRecord

LOCK_FILE = ".lock"
"""What a run holds in its checkpoint directory while it runs (`models/directory_lock.py`)."""
QUIET_AFTER_LAST_STEP = 20.0
"""Seconds without a write after which a run that reached its last step has ended."""
QUIET = 900.0
"""Seconds without a write after which a run of which nothing else is known counts as ended."""


class RunState(NamedTuple):
    """Whether a run goes on, and how that is known."""

    ended: bool
    reason: str = ""


def state_of(record: RunRecord, *, seconds_quiet: float) -> RunState:
    """Whether the run goes on.

    The process that holds its checkpoint directory tells for certain, where it runs on this
    machine; then its last step, if the configuration names one; then its silence.

    Args:
        record: The run, as it was last read.
        seconds_quiet: How long it has written nothing.
    """
    process = _process(record.settings)
    if process == "runs":
        return RunState(ended=False)
    if process == "gone":
        return RunState(ended=True, reason="its process has ended")
    planned = _planned_steps(record)
    if planned is not None and record.num_steps >= planned:
        if seconds_quiet >= QUIET_AFTER_LAST_STEP:
            return RunState(ended=True, reason=f"it has reached its last step, {planned:,}")
    elif seconds_quiet >= QUIET:
        minutes = round(seconds_quiet / 60)
        return RunState(
            ended=True, reason=f"it has written nothing for {minutes:,} minutes: ended, or stuck"
        )
    return RunState(ended=False)


def _planned_steps(record: RunRecord) -> int | None:
    section = record.settings.get(record.kind) or {}
    steps = section.get("max_num_steps") if isinstance(section, Mapping) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _process(settings: Mapping[str, Any]) -> Literal["runs", "gone", "unknown"]:
    """What is known of the process that wrote its name into the lock file."""
    saving = settings.get("checkpointing") or {}
    place = saving.get("checkpoint_dir") if isinstance(saving, Mapping) else None
    if not isinstance(place, str) or not saving.get("enabled", True):
        return "unknown"
    try:
        told = (Path(place).expanduser() / LOCK_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "unknown"
    match = re.fullmatch(r"process (\d+) on (\S+)\n?", told)
    if match is None or match[2] != socket.gethostname():
        return "unknown"
    try:
        os.kill(int(match[1]), 0)  # sends nothing, only asks
    except ProcessLookupError:
        return "gone"
    except (PermissionError, OverflowError):
        return "runs"
    return "runs"

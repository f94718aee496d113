"""What a writer of checkpoints that was killed has left behind: names that begin with a dot."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from laurel.models.checkpoint_reading import is_whole
from laurel.models.manifest import sync_directory

_LEFTOVER = re.compile(
    r"\.(?P<kind>tmp|old|del)-(?P<step>step_(?:0|[1-9][0-9]*))-(?P<id>[0-9a-f]{32})"
)
_LEFTOVER_START = re.compile(r"\.start-[0-9a-f]{32}")
"""Weights that replicas of generation were started from."""
_LEFTOVER_LINK = re.compile(r"\.best-[0-9a-f]{32}")

_log = logging.getLogger(__name__)


def clear_up(root: Path) -> None:
    """Finish or undo what was cut off, and delete the rest. For who holds the lock."""
    names = os.listdir(root)
    leftovers = [match for name in names if (match := _LEFTOVER.fullmatch(name))]
    for match in leftovers:
        target = root / match["step"]
        if match["kind"] == "old" and not os.path.lexists(target):
            # Killed between the two renames of a replacement: finish it, or else undo it.
            fresh = root / f".tmp-{match['step']}-{match['id']}"
            source = fresh if is_whole(fresh) else root / match[0]
            source.rename(target)
            sync_directory(root)
            _log.warning("'%s' was restored after an interrupted save", target)
    for match in leftovers:
        delete(root / match[0])
    for name in filter(_LEFTOVER_START.fullmatch, names):
        delete(root / name)
    for name in filter(_LEFTOVER_LINK.fullmatch, names):
        (root / name).unlink(missing_ok=True)


def delete(directory: Path) -> None:
    """Remove a directory under one of our dot names; what is left of it goes at the next start."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("'%s' could not be deleted whole: %s", directory, error)

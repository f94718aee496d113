"""How much a command says: `laurel --quiet` and `laurel --verbose`, for the whole process."""

from __future__ import annotations

import logging
import sys
from typing import Literal

Verbosity = Literal["quiet", "normal", "verbose"]
"""`quiet`: errors, warnings and results. `verbose`: also the debug messages of Laurel's loggers,
and the traceback of errors that are otherwise told in a sentence."""

_verbosity: Verbosity = "normal"


class _ToStderr(logging.Handler):
    """Writes to what standard error is at the moment: a live display takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


_handler = _ToStderr()
_handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def verbosity() -> Verbosity:
    """How much this process says."""
    return _verbosity


def set_verbosity(wanted: Verbosity) -> None:
    """From now on; consoles that are there already stay as they are."""
    global _verbosity
    _verbosity = wanted
    logger = logging.getLogger("laurel")
    logger.removeHandler(_handler)
    logger.setLevel(logging.NOTSET)
    if wanted == "verbose":
        logger.addHandler(_handler)
        logger.setLevel(logging.DEBUG)

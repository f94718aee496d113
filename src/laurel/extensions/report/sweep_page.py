"""Copies the page of a sweep, which the sweep itself has written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laurel.errors import ConfigError, DataError
from laurel.observe.files import replace_file

PAGE = "report.html"


def copy_page(directories: Sequence[Path], output: Path) -> None:
    """Write the page of a sweep to another file: `laurel report` of its directory.

    Raises:
        ConfigError: More than the directory of one sweep is named.
        DataError: The sweep has not ended yet, or its page cannot be read.
    """
    if len(directories) > 1:
        raise ConfigError(
            "the page of a sweep stands alone: name one directory of a sweep and nothing else, or "
            "the logs of its runs, such as trial_000/seed_42/logs/exp_001"
        )
    page = directories[0] / PAGE
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{page} is not there: the sweep has not ended; run its command again, which goes on"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{page} cannot be read: {error}") from error
    if output.absolute() != page.absolute():
        with replace_file(output) as file:
            file.write(text)

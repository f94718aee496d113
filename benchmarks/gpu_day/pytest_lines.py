"""A plugin of pytest: a JSON line for each finished test, at once, in the file that LINES names."""

import json
import os
from typing import Any

LONGEST = 3000
"""The characters of a failure that are kept, from its end."""


def pytest_runtest_logreport(report: Any) -> None:
    # Processes of pytest-xdist report to the first process, which has them all.
    if os.environ.get("PYTEST_XDIST_WORKER") or (report.when != "call" and report.passed):
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome if report.when == "call" or report.skipped else "error",
        "seconds": round(report.duration, 2),
        "text": "" if report.passed else str(report.longrepr)[-LONGEST:],
    }
    with open(os.environ["LINES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

"""A plugin of pytest: a JSON line for each finished test, at once, in the file that LINES names."""

import json
import os
from typing import Any

LONGEST = 3000
"""The characters of a failure that are kept, from its end."""


class Lines:
    """Writes the lines of one run of tests."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        line = {
            "test": report.nodeid,
            "outcome": report.outcome if report.when == "call" or report.skipped else "error",
            "seconds": round(report.duration, 2),
            "text": "" if report.passed else str(report.longrepr)[-LONGEST:],
        }
        with open(os.environ["LINES"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    # Processes of pytest-xdist report to the first process, which has them all. The environment
    # does not tell: it may be that of a test that runs these tests.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines())

"""What tests of programs share: rows on disk, this machine's isolation, a pool of one worker."""

import json

import pytest

from laurel.extensions.code.sandbox.pool import SandboxPool
from laurel.extensions.code.sandbox.tiers import Tier
from sandbox_processes import isolation


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows as JSON lines and returns the path."""

    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def found():
    """The isolation of programs on this machine, where there is some."""
    found = isolation()
    if found.tier in (None, Tier.LIMITS_ONLY):
        pytest.skip(found.sentence())
    return found


@pytest.fixture(scope="session")
def tier():
    """What programs get here; without anything the tests have nothing to look at."""
    found = isolation()
    if found.tier is None:
        pytest.skip(found.sentence())
    return found.tier


@pytest.fixture
def own_pool(tier):
    """A pool of one worker for one test, which may do it harm."""
    with SandboxPool(tier=tier, num_workers=1) as pool:
        yield pool

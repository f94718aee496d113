"""What tests in several folders share: compiled modules, and one small Ray cluster."""

import compileall
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

from processes import forked

TESTS = Path(__file__).parent

# A thread that calls Ray when its cluster has gone raises, where Ray would start another cluster
# beside the one that the next test starts. Ray reads this when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

# A second thread brings tiny models nothing: where another process of the tests has its core, each
# operation waits for it, and a run takes five times as long. Read when torch is loaded, and passed
# on to the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = ("unit/training/test_learner_group.py", "unit/workers/test_ray_cluster.py")
"""Files that take long and would come last, when other processes have nothing left to do."""


@pytest.fixture(scope="module")
def warm_processes():
    """The tests of this module start processes that are forked (`processes.py`)."""
    with forked():
        yield


class SharedCluster:
    """Started when a test first asks for it; the tests of one folder share it."""

    def __init__(self):
        self._cluster = None

    def running(self):
        module = pytest.importorskip("laurel.workers.ray_cluster", exc_type=ImportError)
        if self._cluster is None or not module.ray.is_initialized():
            self.stop()
            with forked():
                self._cluster = module.RayCluster(cpus=4, gpus=0, object_store_bytes=80 * 2**20)
        return self._cluster

    def stop(self):
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None


_shared = SharedCluster()

MATCHED: dict[str, bool] = {}
"""What the fixture `slow_parameters` gives."""


@pytest.fixture(scope="module")
def small_cluster():
    """A Ray cluster of four slots without GPUs. Give back what you reserve."""
    return _shared.running()


@pytest.fixture
def slow_parameters():
    """Of each name in a mark `slow_parameters`, whether it is in the id of a test."""
    return MATCHED


@pytest.fixture
def short_folder():
    """A folder for sockets, whose paths have 107 characters at most; those of xdist are longer."""
    with tempfile.TemporaryDirectory(prefix="laurel-", ignore_cleanup_errors=True) as name:
        yield name


@pytest.fixture
def no_ray():
    """This process is not connected to Ray."""
    _shared.stop()


def pytest_configure(config):
    """Compile once what the hundreds of processes that tests start import.

    Where PYTHONDONTWRITEBYTECODE is set, each of them would compile it again, which takes seconds.
    """
    if not hasattr(config, "workerinput"):  # of pytest-xdist: it has been done by their parent
        for folder, depth in ((TESTS.parent / "src" / "laurel", 9), (TESTS, 0)):
            compileall.compile_dir(folder, maxlevels=depth, quiet=2)


def pytest_itemcollected(item):
    """`slow_parameters("a", "b")`: `slow` for the tests whose id has one of the names in it."""
    for mark in item.iter_markers("slow_parameters"):
        for name in mark.args:
            key = f"{item.path.relative_to(TESTS)}: {name}"
            if mark in item.own_markers:
                key = f"{item.path.relative_to(TESTS)}::{item.originalname}: {name}"
            is_in_id = hasattr(item, "callspec") and f"-{name}-" in f"-{item.callspec.id}-"
            MATCHED[key] = MATCHED.get(key, False) or is_in_id
            if is_in_id:
                item.add_marker("slow")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage before all tests are there; it takes a fourth of that time.

    What is there then stays, and is left out of what each run in a test collects: so are some
    megabytes of garbage, which it would take a second to find. The modules of tests are kept as
    pytest has rewritten them, which takes five seconds, whatever PYTHONDONTWRITEBYTECODE says.
    """
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = writes_none


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _shared.stop()
    return result

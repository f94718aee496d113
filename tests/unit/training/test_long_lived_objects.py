"""What the garbage collector leaves out while a run trains."""

import gc

import pytest

from laurel.training import loop
from laurel.training.loop import NEW_OBJECTS, long_lived_objects


@pytest.fixture(params=[False, True], ids=["nothing frozen", "frozen by the caller"])
def frozen_before(request, monkeypatch):
    monkeypatch.setattr(loop, "_frozen_by_caller", False)
    thresholds = gc.get_threshold()
    gc.unfreeze()
    if request.param:
        gc.freeze()
    yield request.param
    gc.freeze()  # as in the other tests
    gc.set_threshold(*thresholds)


def test_all_objects_are_left_out_for_a_run_and_those_of_the_caller_after_it(frozen_before):
    thresholds = gc.get_threshold()
    with long_lived_objects():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (NEW_OBJECTS, *thresholds[1:])
    assert bool(gc.get_freeze_count()) == frozen_before
    assert gc.get_threshold() == thresholds


def test_what_python_freezes_at_its_start_is_no_callers(frozen_before, monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # that of 3.12
    gc.unfreeze()
    with long_lived_objects():
        pass
    monkeypatch.undo()
    assert gc.get_freeze_count() == 0


def test_what_a_caller_has_frozen_is_counted_at_the_first_run_alone(frozen_before, monkeypatch):
    counted = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    for _ in range(2):
        with long_lived_objects():
            pass
    # Where there was nothing, the caller may have frozen something since.
    assert len(counted) == (1 if frozen_before else 2)


def test_cycles_of_before_a_run_are_not_kept_by_it(frozen_before):
    class Node:
        ended = False

        def __del__(self):
            Node.ended = True

    one = Node()
    one.itself = one
    del one
    with long_lived_objects():
        assert Node.ended

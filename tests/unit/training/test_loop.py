"""The loop around the steps of every run, with a trainer that only counts, on a real store."""

import json
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console

from laurel.config.policy import CheckpointingConfig
from laurel.config.reward_model import RewardTrainingConfig
from laurel.errors import NonFiniteError, TrainingError, UnsavedError
from laurel.models.checkpoint.store import CheckpointStore, verify
from laurel.observe.progress import TrainingProgress
from laurel.training import loop
from laurel.training.learner import Update
from laurel.training.loop import (
    BEHIND,
    WAITED,
    RunServices,
    Schedule,
    StepSummary,
    TrainingLoop,
)
from laurel.training.stopping import Deadline, EarlyStopping, Goal, NothingLeft, Position, Selection

LOSS = "validation-v_loss"


class Stop:
    """The flag that a signal sets."""

    signal = None

    def __call__(self, *_):
        self.signal = signal.SIGTERM


class State:
    """Writes the position as the whole state of a run, some polls late where it may."""

    def __init__(self, run_dir, *, in_background=False, polls=0):
        self.run_dir, self.saves_in_background, self.polls = run_dir, in_background, polls
        self.hurries, self.full = False, set()
        self.in_background = []

    def write(self, directory, *, position, in_background):
        (directory / "state.json").write_text(json.dumps(asdict(position)))
        self.in_background.append(in_background)
        left = iter(range(self.polls if in_background else 0))

        def written(is_awaited):
            if not is_awaited and next(left, None) is not None:
                return None
            if position.step in self.full:
                raise OSError(28, "No space left on device")
            return 0.25

        return written


class Counting(TrainingLoop):
    """Each step and each validation is noted; `at` has what happens in them."""

    at: dict
    why = None

    def step(self, position):
        number = position.step + 1
        for happen in self.at.get(("step", number), ()):
            happen(self)
        self.taken.append(number)
        return 1.0 / number

    def summarize(self, position, taken, timing):
        assert timing["total_step_time"] >= 0
        return StepSummary(
            metrics={"train/loss": taken},
            kept={"train_loss": taken},
            bad_steps=0,
            num_rows=1,
            num_tokens=1,
        )

    def measure(self, step):
        for happen in self.at.get(("measure", step), ()):
            happen(self)
        self.measured.append(step)
        value = self.losses.get(step, 1.0 / (1 + step))
        logged = {"validation-v/loss": value, "timing/validation/one": 2.0}
        return logged, {} if value is None else {LOSS: value}

    def alarm(self):
        return self.why


class Logged(list):
    def log(self, metrics, *, step):
        self.append((step, dict(metrics)))

    def of(self, name):
        return {step: metrics[name] for step, metrics in self if name in metrics}


class Run:
    """What `laurel` does around a loop: opens the store, goes on from the newest, runs."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.root = folder / "saves"
        self.logged = Logged()
        self.losses = {}

    def __call__(
        self, steps, at=None, *, section=None, saving=None, has_validation=True, key=LOSS, **more
    ):
        """Run up to a step; `at` maps ("step" or "measure", number) to what happens then."""
        section = {"val_period": 2, "max_bad_steps": 3} | (section or {})
        saving = {"save_period": 3, "keep_top_k": None} | (saving or {})
        text = StringIO()
        state = more.pop("state", None) or State(self.root.parent)
        store = CheckpointStore(self.root)
        enabled = more.pop("enabled", True)
        clock = more.pop("clock", None)
        services = {"on_validation": more.pop("on_validation", None)}
        why = more.pop("why", None)
        with store:
            newest = store.newest_whole().path
            position = Position()
            if newest is not None:
                position = Position(**json.loads((newest / "state.json").read_text()))
            console = Console(file=text, width=200)
            loop = Counting(
                RunServices(
                    schedule=Schedule(
                        total_steps=steps,
                        section=RewardTrainingConfig.model_validate(section),
                        saving=CheckpointingConfig.model_validate(saving),
                        has_validation=has_validation,
                        **more,
                    ),
                    state=state,
                    store=store if enabled else None,
                    selection=Selection(key=key),
                    logger=self.logged,
                    progress=TrainingProgress(steps, position.step, console, live=False),
                    stop=Stop(),
                    deadline=Deadline("00:00:10:00", clock=clock) if clock else Deadline(None),
                    **services,
                )
            )
            loop.at, loop.losses, loop.why = at or {}, self.losses, why
            loop.taken, loop.measured = [], []
            self.loop, self.state = loop, state
            try:
                self.outcome = loop.run(position)
            finally:
                self.text = text.getvalue()
        return self.outcome

    @property
    def ended(self):
        return self.outcome.ended, self.outcome.step

    def saved(self):
        with CheckpointStore(self.root) as store:
            for step in store.steps():
                verify(store.path_of(step))
            return store.steps()

    def metric(self, step):
        return verify(self.root / f"step_{step}").metric


@pytest.fixture
def run(tmp_path, monkeypatch):
    # Half a second for all objects of the libraries, for runs that have none of their own.
    monkeypatch.setattr(loop, "long_lived_objects", nullcontext)
    return Run(tmp_path)


def stop(loop):
    loop.services.stop()


def heard(loop):
    """A signal comes in a phase that can be repeated."""
    loop.services.stop()
    loop.check_stop()


def fail(_):
    raise ZeroDivisionError


def run_out(_):
    raise NothingLeft("all tasks have been used")


def test_steps_validations_and_saves_in_their_order(run):
    outcome = run(7)
    assert (run.ended, outcome.signal, outcome.is_early) == (("finished", 7), None, False)
    assert run.loop.taken == [1, 2, 3, 4, 5, 6, 7]
    # Every second step; before the saves of 3 and 6, which their metric ranks; and at the end.
    assert run.loop.measured == [2, 3, 4, 6, 7]
    assert run.saved() == [3, 6, 7]
    assert (outcome.latest, outcome.best) == (run.root / "step_7", run.root / "step_7")
    assert outcome.best_by == LOSS
    assert outcome.metrics == {"validation-v/loss": 1 / 8}
    assert run.metric(6) == pytest.approx(1 / 7)
    totals = run.logged.of("timing/validation/total_validation_time")
    assert totals == dict.fromkeys([2, 3, 4, 6, 7], 2.0)
    assert sorted(run.logged.of(WAITED)) == [3, 6, 7]
    assert run.logged.of(BEHIND) == {}
    info = json.loads((run.root / "step_6" / "training_info.json").read_text())
    assert info == {"total_steps": 6, "train_loss": 1 / 6, LOSS: 1 / 7}


@pytest.mark.parametrize(
    ("section", "more", "measured"),
    [
        ({"val_period": 0}, {"key": None}, [4]),
        ({"val_period": 0, "val_at_end": False}, {"key": None}, []),
        ({"val_period": 0, "val_at_end": False}, {}, [3, 4]),
        ({"val_period": 0, "val_at_end": False}, {"key": "train_loss"}, []),
        ({"val_at_start": True, "val_period": 3}, {"key": None}, [0, 3, 4]),
        ({"val_at_start": True}, {"has_validation": False}, []),
        ({"val_period": 0, "val_at_end": False}, {"enabled": False}, []),
    ],
)
def test_what_is_validated(run, section, more, measured):
    run(4, section=section, **more)
    assert run.loop.measured == measured
    assert run.saved() == ([] if more.get("enabled") is False else [3, 4])


def test_a_checkpoint_is_ranked_by_a_metric_of_its_own_step_only(run):
    run.losses = {3: None, 6: 0.5}
    run(6)
    assert [run.metric(step) for step in (3, 6)] == [None, 0.5]
    assert f"saved {run.root}/step_3; without {LOSS} it cannot be the best" in run.text
    assert "step_6;" not in run.text


@pytest.mark.parametrize("number", range(1, 6))
def test_a_signal_ends_after_its_step_saved_and_the_run_goes_on_as_if_it_never_came(
    run, tmp_path, number
):
    straight = Run(tmp_path / "straight")
    straight(5)
    outcome = run(5, {("step", number): [stop]})
    assert run.loop.taken == list(range(1, number + 1))
    assert (outcome.ended, outcome.step, outcome.signal) == ("signal", number, "SIGTERM")
    assert run.saved()[-1] == number
    assert run.loop.measured == [n for n in (2, 3, 4) if n < number], "it only saves"
    run(5)
    assert run.ended == ("finished", 5)
    assert run.loop.taken == list(range(number + 1, 6))
    for name in ("train/loss", "validation-v/loss"):
        wanted = straight.logged.of(name)
        found = run.logged.of(name)
        assert found.items() >= wanted.items(), name
    assert verify(run.root / "step_5").metric == verify(straight.root / "step_5").metric


def test_a_signal_in_the_last_step_is_a_finish_where_nothing_is_left_to_do(run):
    run(4, {("step", 4): [stop]}, has_validation=False, key=None)
    assert run.ended == ("finished", 4)
    assert run.saved() == [3, 4]


def test_a_signal_in_what_can_be_repeated_gives_the_step_up(run):
    assert run(5, {("step", 1): [heard]}).latest is None
    assert (run.ended, run.saved()) == (("signal", 0), [])
    run(5, {("step", 3): [heard]})
    assert (run.loop.taken, run.ended, run.saved()) == ([1, 2], ("signal", 2), [2])
    before = verify(run.root / "step_2")
    run(5, {("step", 3): [heard]})
    assert (run.ended, verify(run.root / "step_2")) == (("signal", 2), before), "nothing to save"
    run(5)
    assert (run.loop.taken, run.saved()) == ([3, 4, 5], [2, 3, 5])


def test_a_validation_is_cut_short_by_a_signal_and_made_up_for(run):
    run(4, {("measure", 2): [heard]})
    assert (run.ended, run.loop.measured, run.saved()) == (("signal", 2), [], [2])
    assert run.state.hurries
    assert "the validation of step 2 was broken off" in run.text
    assert run.metric(2) is None
    run(4)
    assert run.loop.measured == [2, 3, 4]
    assert run.metric(2) == pytest.approx(1 / 3), "saved anew, with its metric"
    assert not run.state.hurries


def test_a_validation_before_the_first_step_may_be_cut_short_too(run):
    run(2, {("measure", 0): [heard]}, section={"val_at_start": True})
    assert (run.ended, run.loop.taken, run.saved()) == (("signal", 0), [], [])
    run(2, section={"val_at_start": True})
    assert (run.ended, run.loop.measured) == (("finished", 2), [0, 2])


def test_a_signal_in_a_validation_that_ends_all_the_same_is_heard(run):
    run(4, {("measure", 2): [stop]})
    assert (run.ended, run.loop.measured, run.saved()) == (("signal", 2), [2], [2])
    assert run.metric(2) == pytest.approx(1 / 3)


def test_a_run_that_is_killed_goes_on_from_its_newest_checkpoint(run):
    with pytest.raises(ZeroDivisionError):
        run(7, {("step", 5): [fail]})
    assert run.saved() == [3]
    run(7)
    assert (run.loop.taken, run.saved()) == ([4, 5, 6, 7], [3, 6, 7])


def test_a_longer_run_goes_on_from_a_finished_one_and_a_finished_one_does_nothing(run):
    run(2)
    run(2)
    assert (run.ended, run.loop.taken, run.loop.measured) == (("finished", 2), [], [])
    assert run.outcome.latest == run.root / "step_2"
    run(4)
    assert (run.ended, run.loop.taken) == (("finished", 4), [3, 4])


def test_a_metric_that_a_checkpoint_lacks_is_measured_when_the_run_goes_on(run):
    run(3, section={"val_period": 0, "val_at_end": False}, key=None)
    assert (run.loop.measured, run.metric(3)) == ([], None)
    run(5)
    assert (run.loop.measured, run.metric(3)) == ([3, 4, 5], 1 / 4)


class Clock:
    """Ten minutes, of which hardly any is left from a step on."""

    now = 0.0

    def __call__(self):
        return self.now

    def run_down(self, loop):
        self.now = 595.0


def test_a_time_budget_ends_the_run_saved(run):
    clock = Clock()
    outcome = run(9, {("step", 2): [clock.run_down]}, clock=clock, section={"val_period": 0})
    assert (run.ended, outcome.is_early) == (("deadline", 2), False)
    assert (run.loop.measured, run.saved()) == ([], [2])


def test_time_for_the_validation_and_the_saves_before_the_next_step_is_kept(run):
    asked = []

    class Asked(Deadline):
        def is_near(self, *, before=()):
            asked.append(list(before))
            return False

    def watch(loop):
        loop.services.deadline.__class__ = Asked

    state = State(run.root.parent, in_background=True, polls=99)
    run(7, {("step", 1): [watch]}, clock=Clock(), state=state, section={"val_period": 2})
    save, both = ["save"], ["validation", "save"]
    assert asked == [[], ["validation"], both, ["validation", "save"], save, [*both, "save"]]


def test_a_goal_that_a_validation_reaches_ends_the_run(run):
    goal = {"goal": Goal(key=LOSS, threshold=0.9)}
    for _ in range(2):  # the second ends where the first did
        run.losses = {4: 0.9}
        outcome = run(6, **goal)
        assert (run.ended, outcome.is_early) == (("finished", 4), True)
        assert f"step 4 is the last: {LOSS}=0.9000 has reached 0.9" in run.text
        assert run.saved() == [3, 4]
    assert run.loop.taken == []
    run(6, goal=Goal(key=LOSS, threshold=2.0))
    assert run.ended == ("finished", 6)
    run.losses = {0: 3.0}
    at_once = Run(run.root.parent / "start")
    at_once.losses = {0: 3.0}
    at_once(6, section={"val_at_start": True}, **goal)
    assert (at_once.ended, at_once.saved()) == (("finished", 0), [])


def test_a_goal_that_was_not_measured_is_told(run):
    run.losses = {2: None}
    run(3, goal=Goal(key=LOSS, threshold=0.9), saving={"save_period": 9})
    assert f"step 2: no {LOSS} to end the run by" in run.text
    assert run.ended == ("finished", 3)


def test_a_run_that_no_longer_improves_ends_where_it_ends_in_one_piece(run):
    watched = EarlyStopping(key=LOSS, higher_is_better=False, patience=2, min_delta=0.0)
    run.losses = {2: 0.5, 4: 0.6, 6: 0.7, 8: 0.1}
    for limit in (3, 9):
        outcome = run(limit, early_stopping=watched)
    assert (run.ended, outcome.is_early) == (("finished", 6), True)
    assert "was no better than 0.5000 in 2 validations" in run.text
    assert run(9, early_stopping=watched).step == 6, "it has ended"
    whole = Run(run.root.parent / "whole")
    whole.losses = run.losses
    assert not whole(6, early_stopping=watched).is_early, "its last step anyway"


@pytest.mark.parametrize(("last", "is_early"), [(6, True), (4, False)])
def test_who_is_told_of_validations_may_end_the_run(run, last, is_early):
    told = []

    def on_validation(step, metrics):
        told.append((step, metrics[LOSS]))
        return "it is pruned" if step == 4 else None

    outcome = run(last, on_validation=on_validation)
    assert told == [(2, 1 / 3), (3, 1 / 4), (4, 1 / 5)]
    assert (run.ended, outcome.is_early) == (("finished", 4), is_early)
    assert ("step 4 is the last: it is pruned" in run.text) == is_early


@pytest.mark.parametrize(("last", "ended"), [(6, "alarm"), (2, "finished")])
def test_an_alarm_ends_a_run_before_its_last_step(run, last, ended):
    def raise_alarm(loop):
        loop.why = "the rewards are all equal"

    outcome = run(last, {("step", 2): [raise_alarm]})
    assert (run.ended, outcome.is_early) == ((ended, 2), ended == "alarm")
    assert ("step 2 is the last: the rewards are all equal" in run.text) == (ended == "alarm")
    assert (run.loop.measured, run.saved()) == ([2], [2])


def test_an_alarm_of_before_ends_a_resumed_run_at_once(run):
    run(2)
    run(6, why="it was raised before")
    assert (run.ended, run.loop.taken) == (("alarm", 2), [])


def test_a_lack_of_tasks_ends_a_run_with_its_last_validation_and_save(run):
    out = {("step", 4): [run_out]}
    outcome = run(9, out)
    assert (run.ended, outcome.is_early) == (("finished", 3), True)
    assert (run.loop.measured, run.saved()) == ([2, 3], [3])
    assert "all tasks have been used" in run.text
    outcome = run(9, {("step", 6): [run_out]})
    assert (run.loop.measured, run.saved()) == ([4, 5], [3, 5])
    fresh = Run(run.root.parent / "fresh")
    with pytest.raises(TrainingError, match="nothing was learned: all tasks"):
        fresh(9, {("step", 1): [run_out]})


def test_bad_steps_in_a_row_end_the_run(run):
    run(1)
    bad = Update(metrics={}, failure="the loss is inf")

    def count(before, update=bad):
        return run.loop.bad_steps(update, before, where="step 4, row 7", kept="Kept.")

    assert (count(0), count(1)) == (1, 2)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* inf at step 4, row 7\). Kept\."):
        count(2)
    assert count(2, Update(metrics={})) == 0


# Saves that take their time, and disks that are full.


def behind(run, polls=0, full=()):
    state = State(run.root.parent, in_background=True, polls=polls)
    state.full = set(full)
    return state


def test_what_is_written_behind_later_steps_is_seen_between_them(run):
    def until_it_is_whole(loop):
        while not loop.saving._begun.save.ready():
            time.sleep(0.001)

    waits = {("step", number): [until_it_is_whole] for number in (5, 8)}
    run(10, waits, state=behind(run, polls=1))
    assert run.saved() == [3, 6, 9, 10]
    assert run.state.in_background == [True, True, True, False], "nothing comes after the last"
    assert sorted(run.logged.of(WAITED)) == [3, 6, 9, 10]
    found = run.logged.of(BEHIND)
    assert sorted(found) == [5, 8, 10], "at the latest at the end"
    said = [line for line in run.text.splitlines() if line.startswith("saved ")]
    assert said == [f"saved {run.root}/step_{step}" for step in (3, 6, 9, 10)]


def test_the_next_save_and_a_step_that_is_given_up_wait_for_the_one_under_way(run):
    run(7, state=behind(run, polls=99))
    assert sorted(run.logged.of(BEHIND)) == [6, 7]
    run(10, {("step", 10): [heard]}, state=behind(run, polls=99))
    assert (run.ended, run.saved()) == (("signal", 9), [3, 6, 7, 9])
    assert run.state.in_background == [True], "that of 9 is whole, and is not written twice"


@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_costs_its_checkpoints_and_not_the_run(run, in_background):
    state = behind(run, full={3, 6})
    state.saves_in_background = in_background
    outcome = run(9, state=state)
    assert (run.ended, run.saved()) == (("finished", 9), [9])
    assert run.loop.taken == list(range(1, 10))
    missed = [line for line in run.text.splitlines() if "missed saves in a row" in line]
    assert [line.startswith("ALARM: ") for line in missed] == [False, True]
    assert ["row: 1" in missed[0], "row: 2" in missed[1]] == [True, True]
    assert "the checkpoint of step 3 could not be saved" in missed[0]
    assert outcome.latest == run.root / "step_9"


def test_misses_are_counted_in_a_row(run):
    run(10, state=behind(run, full={3, 9}))
    assert run.saved() == [6, 10]
    assert run.text.count("missed saves in a row: 1") == 2
    assert "ALARM" not in run.text


@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_whose_last_save_failed_is_no_success(run, in_background):
    state = behind(run, full={6})
    state.saves_in_background = in_background
    with pytest.raises(UnsavedError, match=r"of step 6, could not be saved; the newest is .*_3"):
        run(6, state=state)
    nothing = Run(run.root.parent / "nothing")
    state = behind(nothing, full={2})
    with pytest.raises(UnsavedError, match=r"nothing of this run was saved.* No space") as end:
        nothing(2, state=state)
    assert (end.value.outcome.step, end.value.outcome.latest) == (2, None)


def test_a_run_that_fails_keeps_the_checkpoint_that_was_under_way(run):
    with pytest.raises(ZeroDivisionError):
        run(9, {("step", 4): [fail]}, state=behind(run, polls=99))
    assert run.saved() == [3]
    with pytest.raises(ZeroDivisionError):  # the error of the disk is not told instead
        run(9, {("step", 7): [fail]}, state=behind(run, polls=99, full={6}))
    assert run.saved() == [3]

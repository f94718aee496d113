"""Learner and generator take turns on one device: one rests while the other works."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.generation.transformers.engine import TransformersEngine
from laurel.run.grpo import assemble
from laurel.training.loop import Interrupted
from policy_fakes import Served
from policy_runs import MATCHES, grpo_settings, metrics_of


class Watched:
    """A learner that notes when it rests, and may not be asked meanwhile."""

    def __init__(self, learner):
        self._learner = learner
        self.rests, self.is_resting = 0, False

    def __getattr__(self, name):
        assert not self.is_resting, f"{name} while it rests"
        return getattr(self._learner, name)

    def update(self, batch, loss):
        assert not self.is_resting
        update = self._learner.update(batch, loss)
        update.performance["rank_token_imbalance"] = 0.25
        return update

    @contextmanager
    def resting(self):
        assert not self.is_resting
        self.is_resting = True
        self.rests += 1
        try:
            yield
        finally:
            self.is_resting = False


class Sleepy:
    """A generator whose rest is noted."""

    def __init__(self):
        self.said = []

    async def sleep(self):
        self.said.append("sleep")

    async def wake(self):
        self.said.append("wake")


def run(directory, change, *settings):
    overrides = [*grpo_settings(directory, None, *MATCHES, *settings)]
    config = load_config(GRPORun, None, overrides).config
    with ExitStack() as stack:
        training, position = assemble(config, stack, console=Console(quiet=True))
        training.parts = change(training.parts)
        training.run(position)
        return training


def test_the_learner_rests_while_completions_are_drawn(tmp_path):
    training = run(
        tmp_path,
        lambda parts: replace(parts, learner=Watched(parts.learner), learner_rests=True),
        "grpo.max_num_steps=2",
        "grpo.val_period=2",
    )
    learner = training.parts.learner
    assert learner.rests == 3, "two steps and a validation"
    assert not learner.is_resting
    logged = metrics_of(tmp_path)
    assert sorted(step for step in logged if step) == [1, 2]
    text = next((tmp_path / "logs").rglob("metrics.jsonl")).read_text()
    assert '"performance/rank_token_imbalance": 0.25' in text, "how even the work was"


def test_the_generator_wakes_also_where_the_learner_fails(tmp_path):
    generator = Sleepy()

    def fail(batch, loss):
        assert generator.said == ["sleep"]
        raise KeyError("no luck")

    def change(parts):
        parts.learner.update = fail
        return replace(parts, generator=generator, generator_rests=True)

    with pytest.raises(KeyError, match="no luck"):
        run(tmp_path, change, "grpo.max_num_steps=1", "grpo.val_period=0")
    assert generator.said == ["sleep", "wake"]


@pytest.fixture
def events(monkeypatch):
    """What happens to the generator and to models on its device, in order."""
    Served.EVENTS.clear()

    def noting(name, event):
        method = getattr(TransformersEngine, name)

        def noted(self, *arguments):
            Served.EVENTS.append(event)
            return method(self, *arguments)

        monkeypatch.setattr(TransformersEngine, name, noted)

    noting("generate", "draw")
    noting("sleep", "generator sleeps")
    noting("wake", "generator wakes")
    noting("update_weights", "new weights")
    return Served.EVENTS


SERVED = "env.custom.matches.name=policy_fakes.Served"


def test_served_models_sleep_but_for_the_scores(tmp_path, events):
    run(tmp_path, lambda parts: parts, "grpo.max_num_steps=2", "grpo.val_period=1", SERVED)
    drawn = ["draw", "generator sleeps", "models wake", "score", "models sleep"]
    step = [*drawn, "generator wakes", "new weights"]
    validation = [*drawn, "generator wakes"]  # for the next step
    whole = ["models sleep", *step, *validation, *step, *drawn]
    assert [event for event, _ in groupby(events)] == [
        *whole,
        "models end",
        "models wake",
        "models end",
    ]


def test_a_generator_that_is_never_idle_shares_with_models_that_are_awake(tmp_path, events):
    run(
        tmp_path,
        lambda parts: parts,
        "grpo.max_num_steps=1",
        "grpo.val_period=0",
        "grpo.max_staleness=1",
        "loss_fn.use_importance_sampling_correction=true",
        SERVED,
    )
    assert not {"models sleep", "models wake", "generator sleeps"} & set(events)


def test_a_learner_that_saves_after_a_signal_finds_the_memory_free(tmp_path, events):
    class Noted(Watched):
        @contextmanager
        def resting(self):
            try:
                with super().resting():
                    yield
            finally:
                events.append("learner wakes")

    def change(parts):
        take = parts.source.take

        def interrupted(step, **options):
            take(step, **options)
            raise Interrupted

        parts.source.take = interrupted
        return replace(parts, learner=Noted(parts.learner), learner_rests=True)

    run(tmp_path, change, "grpo.max_num_steps=2", "grpo.val_period=0", SERVED)
    told = [event for event, _ in groupby(events)]
    assert told[told.index("score") :][:3] == ["score", "models sleep", "learner wakes"]

"""Which environments need slots of the cluster."""

import json
import shutil
from contextlib import ExitStack
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel import plugins
from laurel.config.data import TaskDataConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.policy import TokenizerConfig
from laurel.config.yaml_tree import Section
from laurel.data.tasks import environments_named
from laurel.errors import ConfigError
from laurel.models.checkpoint.store import CheckpointStore
from laurel.planning.plan import plan_run
from laurel.plugins import EnvironmentKind
from laurel.run.allocation import Allocation
from laurel.run.context import RunContext
from laurel.run.grpo import _load_data
from laurel.run.request import request_of
from laurel.run.tasks import dated, environments_of, needs_of, nodes_of
from laurel.training.stopping import Selection
from laurel.types import Message, Task
from saved_steps import save_step, writer

DATA: Any = SimpleNamespace(
    train=[Task(id="1", prompt=(Message("user", "Why?"),), environment="reward_model")],
    validation=[],
)
ELSEWHERE = Allocation(
    plan=plan_run(request_of(load_config(GRPORun, None, []).config)),
    reservations={},
    stack=ExitStack(),
)
"""Somebody has slots, and the reward model has none."""


def config_of(*overrides):
    return load_config(GRPORun, None, ["env.reward_model.enabled=true", *overrides]).config


def elsewhere(config, stack):
    return RunContext(config=config, console=Console(), stack=stack, allocation=ELSEWHERE)


def test_a_function_is_called_here_though_the_run_is_on_a_cluster():
    config = config_of("env.reward_model.function={path: 'word_function:compute_score'}")
    with ExitStack() as stack:
        found = environments_of(DATA, elsewhere(config, stack))
        log = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
        verdicts = found["reward_model"].step([log], [None])
    assert verdicts.failures == [None]


def test_a_model_goes_into_its_slots(tmp_path):
    config = config_of(f"env.reward_model.model_name={tmp_path}")
    with ExitStack() as stack, pytest.raises(AssertionError):  # which it does not have here
        environments_of(DATA, elsewhere(config, stack))


def test_programs_run_here_unless_roles_are_in_processes_of_their_own():
    assert nodes_of(None) is None
    assert nodes_of(ELSEWHERE) is not None


def test_a_run_that_is_resumed_keeps_its_first_day(tmp_path):
    """Models of environments are loaded anew, and their templates may print the date."""
    saves = tmp_path / "saves"
    days = {1: None, 2: "2024-07-26"}
    with CheckpointStore(saves) as store:
        for step, day in days.items():
            run = json.dumps({"run_dir": "", "identity": {}, "step": step, "day": day}).encode()
            save_step(store, step, lambda to, run=run: writer("", {"training/run.json": run})(to))
    where = f"checkpointing.checkpoint_dir={saves}"
    config = config_of("env.reward_model.model_name=m", where)
    for expected in (date(2024, 7, 26), date.today()):
        with ExitStack() as stack:
            context = RunContext(config=config, console=Console(), stack=stack)
            assert context.with_store(Selection(key=None)).day == expected
        shutil.rmtree(saves / "step_2", ignore_errors=True)


def test_every_template_of_an_environment_gets_the_day_unless_it_has_its_own():
    own, day = {"tokenizer": {"date": "2020-02-02"}}, date(2024, 7, 26)
    for section, expected in (
        ({"model_name": "m"}, [day]),
        ({"model_name": "m", **own}, [date(2020, 2, 2)]),
        ({"model_name": "m", "judge": {}, **own}, [date(2020, 2, 2)]),
        (
            {"models": [{"name": "a", "model_name": "m"}, {"name": "b", "model_name": "n", **own}]},
            [day, day, date(2020, 2, 2)],
        ),
    ):
        env = EnvironmentsConfig.model_validate({"reward_model": {"enabled": True, **section}})
        assert days_of(dated(env, day)) == expected
        assert day not in days_of(env), "the configuration itself is what the user wrote"


def days_of(section):
    """The days of all tokenizers within a section."""
    found = []
    for value in (getattr(section, name) for name in type(section).model_fields):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, TokenizerConfig):
                found.append(one.date)
            elif isinstance(one, Section):
                found += days_of(one)
    return found


KINDS = [
    name
    for name in plugins.names("environments")
    if not plugins.find(EnvironmentKind, name).several and name != "reward_model"
]
NAMED = {
    "by default": {"env_name": "{}"},
    "by a training set": {"train": [{"data_path": "a"}, {"data_path": "b", "env_name": "{}"}]},
    "by a validation set": {"validation": {"x": {"data_path": "a", "env_name": "{}"}}},
    "by its rows": {"train": [{"data_path": "a"}, {"dataset_name": "{}"}]},
    "by its rows of validation": {"validation": {"x": {"dataset_name": "{}"}}},
}


@pytest.mark.parametrize("way", NAMED)
def test_every_environment_that_is_named_is_asked_what_it_needs(way, monkeypatch):
    """Of rows, and of the run: also one that has no settings."""
    tried = 0
    for name in KINDS:
        if "rows" in way and name not in plugins.names("rows"):
            continue
        data = json.loads(json.dumps(NAMED[way]).replace("{}", name))
        config = GRPORun(data=TaskDataConfig.model_validate(data))
        kind = type(plugins.find(EnvironmentKind, name))
        with monkeypatch.context() as patched:
            patched.setattr(kind, "needs", lambda self, section: ["answers", "tests"])
            asked = environments_named(config.data.sets(), config.default_environment)
            needs = needs_of(config.env, *asked)
            assert name in needs.answers & needs.tests

            def refuse(self, section, run: GRPORun, where):
                raise ValueError(f"{where} does not fit {run.command}")

            patched.setattr(kind, "check", refuse)
            with pytest.raises(ConfigError, match=rf"env\.{name} does not fit"):
                _load_data(config)
        tried += 1
    assert tried

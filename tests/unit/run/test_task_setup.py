"""Which environments need slots of the cluster."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.run.allocation import Allocation
from laurel.run.context import RunContext
from laurel.run.tasks import environments_of, nodes_of
from laurel.types import Message, Task

DATA: Any = SimpleNamespace(
    train=[Task(id="1", prompt=(Message("user", "Why?"),), environment="reward_model")],
    validation=[],
)
ELSEWHERE: Any = {"policy": None}
"""Somebody has slots, and the reward model has none."""


def config_of(*overrides):
    return load_config(GRPORun, None, ["env.reward_model.enabled=true", *overrides]).config


def elsewhere(config, stack):
    allocation = Allocation(reservations=ELSEWHERE)
    return RunContext(config=config, console=Console(), stack=stack, allocation=allocation)


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
    assert nodes_of(Allocation()) is None
    assert nodes_of(Allocation(reservations=ELSEWHERE)) is not None

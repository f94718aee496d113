"""The last words of a run, and the warnings that must not drown in its first ones."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.algorithms.training_loop import Outcome
from laurel.cli import train
from laurel.cli.train import conclude
from laurel.cli.trained_model import describe_model
from laurel.config.grpo_training import GRPORun
from laurel.config.load import load_config


def last_words(outcome: Outcome, limit: str | None = None) -> str:
    stream = io.StringIO()
    conclude(outcome, Console(file=stream, width=200), use="{}", limit=limit)
    return stream.getvalue().strip()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"ended": "signal", "signal": "SIGINT"},
         "stopped by SIGINT after step 29, 6 s in; run it again to go on"),
        ({"ended": "deadline"},
         "stopped by its time budget after step 29, 6 s in; run it again to go on"),
        ({"ended": "finished"}, "finished after step 29, in 6 s"),
    ],
)  # fmt: skip
def test_how_long_it_took_is_not_when_to_go_on(how: dict[str, Any], words: str) -> None:
    assert last_words(Outcome(step=29, seconds=6.2, **how)) == words


@pytest.mark.parametrize(
    ("settings", "is_early", "expected"),
    [
        (["grpo.max_num_steps=60"], False,
         "grpo.max_num_epochs=1 ended it before grpo.max_num_steps=60"),
        (["grpo.max_num_steps=22"], False, None),
        (["grpo.max_num_steps=60"], True, None),
        ([], False, None),
    ],
)  # fmt: skip
def test_epochs_that_end_a_run_before_its_steps_are_named(
    settings: list[str], is_early: bool, expected: str | None
) -> None:
    config = load_config(GRPORun, None, settings).config
    outcome = Outcome(step=22, ended="finished", is_early=is_early)
    limit = train._limit("grpo", config, outcome)
    assert limit == expected
    assert (expected is None) == last_words(outcome, limit).endswith("in 0 s")


def test_a_model_that_is_named_and_not_loaded_is_a_warning() -> None:
    stream = io.StringIO()
    facts: Any = SimpleNamespace(
        num_trained=1, num_parameters=1, class_name="X", base_model="nothing", device="cpu",
        path="padded", notes=("warning: policy.model_name=a is not loaded", "another"),
    )  # fmt: skip
    here: Any = SimpleNamespace(describe=list)
    policy: Any = SimpleNamespace(precision="float32")
    describe_model("model", facts, policy, here, Console(file=stream, width=200))
    lines = stream.getvalue().splitlines()
    assert "warning: policy.model_name=a is not loaded" in lines
    assert "note    another" in lines

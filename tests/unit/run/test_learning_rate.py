"""The learning rate of a reward model where nobody chose one."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError
from laurel.run.context import RunContext
from laurel.run.reward_model import resolve_rate

SIZES = {
    "model_type": "llama",
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def run_of(*overrides, schema=RewardTrainingRun):
    return load_config(schema, None, overrides).config


def resolved(config, resume_from=None):
    out = StringIO()
    context = RunContext(
        config=config, console=Console(file=out, width=200), stack=None, resume_from=resume_from
    )
    found = resolve_rate(context).config
    return found.policy.optimizer.kwargs, out.getvalue()


@pytest.mark.parametrize(
    ("hidden", "rate", "told"), [(64, 1e-4, "fewer than 500"), (4096, 2e-6, "500 million or more")]
)
def test_it_is_that_of_the_models_size(tmp_path, hidden, rate, told):
    sizes = {**SIZES, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    kwargs, text = resolved(run_of(f"policy.model_name={tmp_path}"))
    assert kwargs == {"lr": rate, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-5}
    assert told in text


def test_a_new_model_and_one_of_unknown_size_have_that_of_larger_ones(tmp_path):
    assert resolved(run_of("policy.scratch={}"))[0]["lr"] == 2e-6
    kwargs, text = resolved(run_of(f"policy.model_name={tmp_path}"))
    assert kwargs["lr"] == 2e-6
    assert "not known" in text


@pytest.mark.parametrize(
    "saved", ["policy.optimizer.kwargs.lr=2e-6", "policy.optimizer.kwargs.lr=3e-4"]
)
def test_a_run_that_resumes_keeps_its_own(tmp_path, saved):
    (tmp_path / "config.yaml").write_text(to_yaml(run_of("policy.scratch={}", saved)))
    kwargs, text = resolved(run_of("policy.scratch={}"), resume_from=tmp_path)
    assert kwargs["lr"] == float(saved.partition("=")[2])
    assert "as the run began" in text


def test_one_that_was_chosen_is_taken():
    assert resolved(run_of("policy.scratch={}", "policy.optimizer.kwargs.lr=3e-5")) == (
        {"lr": 3e-5, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-5},
        "",
    )


def test_nobody_else_chooses_one():
    with pytest.raises(ConfigError, match=r"kwargs.lr is 'auto', and must be a finite number"):
        run_of("policy.optimizer.kwargs.lr=auto", schema=GRPORun)
    with pytest.raises(ConfigError, match=r"kwargs.eps is 'auto'"):
        run_of("policy.optimizer.kwargs.eps=auto")

"""What models, scorers and engines are given out of the configuration of a run."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from laurel.config.grpo_run import GRPORun
from laurel.config.policy import (
    LoraConfig,
    NamedCall,
    PolicyConfig,
    RewardPolicyConfig,
    ScratchConfig,
)
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.models.spec import ModelSpec
from laurel.rewards.spec import ScorerSpec
from laurel.run.generator import generator_spec
from laurel.run.model import model_spec
from laurel.run.request import epoch_notes, step_order
from laurel.run.specs import scorer_spec

SECTION = {
    "model_name": "gods/laurel",
    "revision": "abc",
    "trust_remote_code": True,
    "safetensors_only": False,
    "hf_config_overrides": {"attention_dropout": 0.25},
    "scratch": {"hidden_size": 32},
    "tokenizer": {"pad_token": "<pad>"},
    "reward_model_cfg": {"reward_model_type": "regression", "attributes": ["helpfulness"]},
    "precision": "float32",
    "sequence_packing": {"enabled": False},
    "compile": True,
    "dtensor_cfg": {
        "lora_cfg": {"enabled": True},
        "activation_checkpointing": True,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "cpu_offload": True,
        "custom_parallel_plan": "their.plan",
    },
}


def test_nothing_of_a_model_is_left_out():
    spec = model_spec(RewardPolicyConfig.model_validate(SECTION))
    # Padded rows are not divided.
    divided = {
        **SECTION,
        "sequence_packing": {"enabled": True},
        "dtensor_cfg": {"context_parallel_size": 4},
    }
    with_cp = model_spec(RewardPolicyConfig.model_validate(divided))
    plain = asdict(ModelSpec())
    assert model_spec(PolicyConfig(model_name="a/b")) == ModelSpec(name="a/b")
    alike = [
        one.name
        for one in fields(spec)
        if asdict(spec)[one.name] == asdict(with_cp)[one.name] == plain[one.name]
    ]
    assert alike == []
    assert (spec.name, spec.lora, spec.parallel_plan) == (
        "gods/laurel",
        LoraConfig(enabled=True),
        "their.plan",
    )


@pytest.mark.parametrize(
    ("given", "resume_from", "expected"),
    [
        ({}, None, "a/b"),
        ({}, Path("step_1"), "step_1"),
        ({"lora": LoraConfig()}, Path("step_1"), "a/b"),
        ({"scratch": ScratchConfig()}, None, None),
        ({"scratch": ScratchConfig()}, Path("step_1"), "step_1"),
        ({"scratch": ScratchConfig(), "lora": LoraConfig()}, Path("step_1"), None),
    ],
)
def test_where_weights_are_read(given, resume_from, expected):
    assert ModelSpec(name="a/b", **given).weights_from(resume_from) == expected


def test_a_length_that_is_asked_for_goes_before_that_of_the_section():
    policy = PolicyConfig(max_total_sequence_length=100)
    assert scorer_spec(ScorerSpec(), policy).max_length == 100
    asked = ScorerSpec(max_length=50, precision="float16", model=ModelSpec(name="a/b"))
    found = scorer_spec(asked, policy)
    assert (found.max_length, found.precision) == (50, "float16")
    assert found.model == replace(model_spec(policy), name="a/b")
    assert scorer_spec(ScorerSpec(), PolicyConfig()).max_length is None


def test_an_engine_is_told_of_the_whole_section():
    config = GRPORun.model_validate(
        {
            "grpo": {"seed": 3},
            "policy": {"max_total_sequence_length": 100, "generation": {"max_concurrent": 7}},
        }
    )
    spec = generator_spec(config, [1, 2])
    assert (spec.seed, spec.max_length, spec.end_ids, spec.weight_version) == (3, 100, (1, 2), 0)
    assert spec.settings == config.policy.generation


@pytest.mark.parametrize(
    ("kind", "section", "head"),
    [(RewardTrainingRun, "rm", {}), (SFTRun, "sft", {})],
)
def test_the_order_is_that_of_the_file_or_of_the_seed(kind, section, head):
    def rows(shuffle, seed):
        config = kind.model_validate(
            {
                "policy": {"train_global_batch_size": 4, **head},
                "data": {"shuffle": shuffle},
                section: {"seed": seed},
            }
        )
        order = step_order(config, 9)
        return [row for step in range(3) for row in order.rows(step)]

    assert rows(False, 1) == list(range(9))
    assert sorted(rows(True, 1)) == list(range(9))
    assert rows(True, 1) == rows(True, 1) != rows(True, 2)


def test_rows_that_begin_alike_share_only_where_the_packing_does():
    data = {"group_by_prefix": True}
    assert RewardTrainingRun.model_validate({"data": data}).data.group_by_prefix
    packing = {"sequence_packing": {"enabled": False}}
    with pytest.raises(ValueError, match=r"data\.group_by_prefix .*sequence_packing\.enabled"):
        RewardTrainingRun.model_validate({"data": data, "policy": packing})


@pytest.mark.parametrize(
    ("num_steps", "name", "rate", "is_noted"),
    [
        (8, "torch.optim.AdamW", 2e-6, True),  # 1,000 rows by the defaults
        (300, "torch.optim.AdamW", 2e-6, False),  # 40,000 rows
        (8, "torch.optim.AdamW", 2e-5, False),
        (1, "torch.optim.SGD", 1e-6, False),
    ],
)
def test_a_run_that_is_too_short_for_its_rate_is_noted(
    num_steps: int, name: str, rate: float, is_noted: bool
) -> None:
    policy = PolicyConfig(optimizer=NamedCall(name=name, kwargs={"lr": rate}))

    notes = epoch_notes(policy, 128, num_steps)

    assert bool(notes) is is_noted
    assert all("policy.optimizer.kwargs.lr" in note for note in notes)

"""Where a run goes, and what is refused before anything is started."""

import pytest

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError
from laurel.run.allocation import plan_allocation

JUDGED = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
ONE_FOR_JUDGING = (*JUDGED, "env.reward_model.resources.gpus_per_node=1")


def planned(*overrides, schema=GRPORun):
    return plan_allocation(load_config(schema, None, overrides).config)


def test_one_slot_is_this_process():
    assert not planned().are_remote
    assert not planned(schema=RewardTrainingRun).are_remote
    assert not planned(*JUDGED).are_remote


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.gpus_per_node=2", *ONE_FOR_JUDGING),
        ("cluster.num_nodes=2", "policy.dtensor_cfg.cpu_offload=true"),
        ("cluster.backend=ray",),
        ("cluster.address=auto",),
    ],
)
def test_more_slots_or_an_address_are_ray(overrides):
    assert planned(*overrides).are_remote


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.gpus_per_node=2", "cluster.backend=local"), r"cluster\.backend=local"),
        (("policy.dtensor_cfg.tensor_parallel_size=2",), r"tensor_parallel_size=2.*\n.*fix"),
        (("policy.dtensor_cfg.cpu_offload=true",), "the policy has one rank"),
        (("cluster.gpus_per_node=1", *ONE_FOR_JUDGING), "resources.gpus_per_node"),
    ],
)
def test_what_cannot_be_is_told_with_the_key(overrides, said):
    with pytest.raises(ConfigError, match=said):
        planned(*overrides)


def test_every_conflict_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        planned(
            "cluster.gpus_per_node=4",
            "policy.dtensor_cfg.tensor_parallel_size=3",
            "env.reward_model.resources.gpus_per_node=2",
            "env.reward_model.dtensor_cfg.tensor_parallel_size=3",
            *JUDGED,
        )
    for section in ("policy", "env.reward_model"):
        assert f"{section}.dtensor_cfg.tensor_parallel_size=3: groups of 3" in str(caught.value)

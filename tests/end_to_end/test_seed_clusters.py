"""The two clusters that NeMo RL's reward-model environment was shown on, with tiny models.

CPU slots stand for GPUs: the policy's tensor parallelism is 2, the reward model's 4. One node has 8
slots as there; of the two each has half as many, because 16 ranks take a minute to start.
`unit/planning/test_plan.py` plans the original.
"""

import pytest

from policy_runs import grpo, grpo_settings, metrics_of, sft, sft_settings
from runs import settings, train

ray = pytest.importorskip("ray")

FOUR_HEADS = (
    "policy.scratch.num_heads=4",
    "policy.scratch.hidden_size=32",
    "+policy.scratch.config_overrides.num_key_value_heads=4",
)
JUDGED = (
    "env.reward_model.enabled=true",
    "env.reward_model.precision=float32",
    "env.reward_model.dtensor_cfg.tensor_parallel_size=4",
    "policy.dtensor_cfg.tensor_parallel_size=2",
    "data.env_name=reward_model",
    "cluster.gpus_per_node=8",
    "grpo.max_num_steps=1",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
)
COLOCATED = ("env.reward_model.resources.gpus_per_node=4",)
NON_COLOCATED = (
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=4",
    "env.reward_model.resources.gpus_per_node=4",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=2",
    "policy.generation.colocated.resources.num_nodes=1",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a reward model whose heads can be divided by four."""
    directory = tmp_path_factory.mktemp("models")
    policy = sft(sft_settings(directory / "policy", *FOUR_HEADS, "sft.max_num_steps=2"))
    judge = train(settings(directory / "judge", *FOUR_HEADS, "rm.max_num_steps=2"))
    assert policy.outcome.latest is not None
    assert judge.outcome.latest is not None
    return policy.outcome.latest, judge.outcome.latest


def run(directory, models, *changes):
    policy, judge = models
    named = f"env.reward_model.model_name={judge}"
    text = grpo(grpo_settings(directory, policy, *JUDGED, named, *changes)).text
    assert metrics_of(directory)[1]["env/reward_model/num_samples"] == 12
    return text


@pytest.mark.slow
def test_colocated_on_one_node(tmp_path, models, no_ray):
    text = run(tmp_path, models, *COLOCATED)
    assert "policy: node 0, slots 0-3" in text
    assert "generation: node 0, slots 0-3, in turns with policy" in text
    assert "reward_model: node 0, slots 4-7" in text


@pytest.mark.slow
def test_not_colocated_on_two_nodes(tmp_path, models, no_ray):
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": 80 * 2**20,
        },
    )
    try:
        nodes.add_node(num_cpus=4, num_gpus=0, object_store_memory=80 * 2**20)
        text = run(tmp_path, models, *NON_COLOCATED, f"cluster.address={nodes.address}")
        assert "policy: node 0, slots 0-1" in text
        assert "generation: node 0, slots 2-3" in text
        assert "reward_model: node 1, slots 0-3" in text
    finally:
        ray.shutdown()
        nodes.shutdown()

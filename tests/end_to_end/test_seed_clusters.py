"""The two nodes that NeMo RL's reward-model environment was shown on, with tiny models.

CPU slots stand for GPUs. Each node has two, because 16 ranks take a minute to start.
`unit/planning/test_plan.py` plans the original, and that on one node, which `test_on_ray.py` runs
with half as many ranks.
"""

import pytest

from policy_runs import grpo, grpo_settings, metrics_of

ray = pytest.importorskip("ray")

NON_COLOCATED = (
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=2",
    "data.env_name=reward_model",
    "env.reward_model.enabled=true",
    "env.reward_model.precision=float32",
    "env.reward_model.dtensor_cfg.tensor_parallel_size=2",
    "env.reward_model.resources.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
    "grpo.max_num_steps=1",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
)


@pytest.mark.slow
def test_not_colocated_on_two_nodes(tmp_path, no_ray, model, judge):
    from ray.cluster_utils import Cluster

    slots = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**slots, "include_dashboard": False})
    try:
        nodes.add_node(**slots)
        named = f"env.reward_model.model_name={judge}"
        where = f"cluster.address={nodes.address}"
        text = grpo(grpo_settings(tmp_path, model, *NON_COLOCATED, named, where)).text
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert metrics_of(tmp_path)[1]["env/reward_model/num_samples"] == 12
    assert "policy: node 0, slot 0" in text
    assert "generation: node 0, slot 1" in text
    assert "reward_model: node 1, slots 0-1" in text

"""`run.yaml` of docs/clusters.md: a GRPO run that four nodes of eight GPUs can hold."""

from pathlib import Path

Path("run.yaml").write_text(
    "defaults: examples/configs/grpo_math_1B.yaml\ncluster: {num_nodes: 4, gpus_per_node: 8}\n"
)

"""The logger of Weights & Biases (extra `wandb`)."""

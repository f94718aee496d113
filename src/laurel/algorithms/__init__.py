"""How a model learns: losses, advantages, the learner, and the loops of rewards, SFT and GRPO."""

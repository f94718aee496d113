"""The generator and the reward-model scorer that run on vLLM."""

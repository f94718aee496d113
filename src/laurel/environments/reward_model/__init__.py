"""The parts of the reward-model environment: how its scorers are opened."""

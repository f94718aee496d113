"""The page of a run: findings, curves, samples, and following a run while it goes on."""

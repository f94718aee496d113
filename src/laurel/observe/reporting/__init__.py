"""The parts of a report's page: findings, curves, samples, and following a run."""

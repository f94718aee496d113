"""Loads, runs, parallelizes and checkpoints models, and defines the scoring contract."""

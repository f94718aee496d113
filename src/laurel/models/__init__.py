"""Loads, runs, shards and checkpoints models, and defines how conversations become scores."""

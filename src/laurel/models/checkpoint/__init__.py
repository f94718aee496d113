"""Checkpoints: written whole or not at all, verified at load, exported."""

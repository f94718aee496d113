"""Writes checkpoints completely or not at all, verifies them at load, and exports models."""

"""Evaluations of models, run from beginning to end."""

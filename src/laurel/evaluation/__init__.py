"""Evaluations: figures of a model's scores or rewards, with their confidence intervals."""

"""Scorers of completions: models, judges, functions, or several of them."""

"""Scores by a Python function, called here or in processes, and what makes its calls."""

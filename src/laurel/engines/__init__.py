"""Generators: what draws completions from the policy."""

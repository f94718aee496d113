"""Generators, which sample completions from the policy."""

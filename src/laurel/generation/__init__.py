"""Generators: they sample completions from the policy."""

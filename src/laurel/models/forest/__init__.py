"""Runs models on token forests: packed rows with each prompt once, before all its completions.

The package contains the attention, the KV cache of generation, and the heads of reward models and
policies with their outputs.
"""

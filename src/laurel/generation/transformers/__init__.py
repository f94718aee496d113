"""The in-process generator on a transformers model: continuous batching over token forests."""

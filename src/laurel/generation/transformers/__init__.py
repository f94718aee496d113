"""The generator in this process, on a model of transformers: continuous batching over forests."""

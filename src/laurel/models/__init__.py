"""Models: loading, forest computation, parallelism, checkpoints and the scoring contract."""

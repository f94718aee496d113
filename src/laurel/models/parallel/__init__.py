"""Shards models over ranks, by data, tensor and context parallelism."""

"""Computes models on token forests: attention, decoding, heads and their outputs."""

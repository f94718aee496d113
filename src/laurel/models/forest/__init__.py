"""Models computed on token forests: attention, decoding, outputs and heads."""

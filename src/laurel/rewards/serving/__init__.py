"""Servers of language models that a run starts, for functions that ask them."""

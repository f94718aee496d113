"""The generator and the scorer that run on vLLM."""

"""Samples completions and scores conversations with vLLM (extra `vllm`)."""

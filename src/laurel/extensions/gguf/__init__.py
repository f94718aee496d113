"""GGUF files, the format of llama.cpp, as models (extra `gguf`)."""

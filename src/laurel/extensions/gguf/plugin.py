"""The plug-in that reads GGUF files."""

from __future__ import annotations

from laurel.plugins import ModelFiles, NamedFile, ReadModel


class Gguf(ModelFiles):
    """Files of llama.cpp, read by transformers and written once as Hugging Face files."""

    def make(self, section: None, file: NamedFile) -> ReadModel:
        """Return the directory in the cache."""
        from laurel.extensions.gguf.reading import read_gguf

        return read_gguf(file.name, key=file.key)

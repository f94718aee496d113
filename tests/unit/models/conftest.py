"""Tiny models are quickest, and give the same bits everywhere, on one thread."""

import pytest

import threads
from model_directories import save_model

one_thread = threads.one_thread


@pytest.fixture
def save(tmp_path):
    """Saves a model and a tokenizer as Hugging Face does, and returns the directory."""

    def write(model, tokenizer=None, name="model"):
        return save_model(tmp_path / name, model, tokenizer)

    return write

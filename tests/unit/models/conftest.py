"""Tiny models are quickest, and give the same bits everywhere, on one thread."""

import pytest
import torch

from model_directories import save_model


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def save(tmp_path):
    """Saves a model and a tokenizer as Hugging Face does, and returns the directory."""

    def write(model, tokenizer=None, name="model"):
        return save_model(tmp_path / name, model, tokenizer)

    return write

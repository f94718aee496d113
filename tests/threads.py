"""Tiny models are quickest, and give the same bits everywhere, on one thread.

A module or a conftest takes a fixture by naming it: `one_thread = threads.one_thread`.
"""

import pytest
import torch


def _on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


one_thread = pytest.fixture(autouse=True)(_on_one_thread)
one_thread_of_module = pytest.fixture(scope="module", autouse=True)(_on_one_thread)
"""From before the first fixture of a module on."""

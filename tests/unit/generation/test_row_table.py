"""The columns of completions under way."""

import numpy as np
import pytest
import torch

from laurel.generation.transformers.batch import FIRST_WIDTH, RowTable
from laurel.types import SamplingParams


def record(table, slots, tokens):
    slots = np.array(slots)
    return table.record(slots, np.array(tokens), np.zeros(len(tokens))).tolist()


def test_stop_tokens_and_the_limit_end_a_completion():
    table = RowTable(3, 10, [2])
    short = table.begin(1, SamplingParams(max_new_tokens=2))
    stops = table.begin(2, SamplingParams(max_new_tokens=9, stop_token_ids=(7,)))
    other = table.begin(3, SamplingParams(max_new_tokens=9))
    assert table.num_free == 0
    assert record(table, [short, stops, other], [5, 5, 7]) == [False, False, False]
    assert record(table, [short, stops, other], [5, 7, 2]) == [True, True, True]
    assert table.is_stop(np.array([short, stops, other]), np.array([5, 7, 2])).tolist() == [
        False,
        True,
        True,
    ]
    ids_L, logprobs_L = table.end(stops)
    assert ids_L.tolist() == [5, 7]
    assert (ids_L.dtype, logprobs_L.dtype) == (np.int32, np.float32)
    assert table.num_free == 1


def test_numbers_are_those_of_the_seed_however_long_it_gets():
    count = 3 * FIRST_WIDTH
    table = RowTable(2, 10, [])
    slot = table.begin(77, SamplingParams(max_new_tokens=count))
    table.begin(5, SamplingParams(max_new_tokens=count))
    slots = np.array([slot])
    found = []
    for _ in range(count):
        found.append(float(table.next_uniforms(slots)[0]))
        record(table, slots, [1])
    expected = np.random.Generator(np.random.Philox(77)).random(count)
    assert found == expected.tolist()
    late = table.end(slot) and table.begin(77, SamplingParams(max_new_tokens=1))
    assert table.next_uniforms(np.array([late]))[0] == expected[0]


def test_how_the_next_tokens_are_drawn():
    table = RowTable(3, 10, [])
    plain = table.begin(1, SamplingParams(max_new_tokens=1))
    cut = table.begin(2, SamplingParams(max_new_tokens=1, top_p=0.5, temperature=0.25))
    greedy = table.begin(3, SamplingParams(max_new_tokens=1, top_k=99, temperature=0.0))
    how = table.sampling(np.array([greedy, plain, cut]), torch.device("cpu"))
    assert how.temperature_N.tolist() == [0.0, 1.0, 0.25]
    assert how.top_p_N.tolist() == [1.0, 1.0, 0.5]
    assert how.top_k_N.tolist() == [10, 0, 0]  # as many as there are
    assert how.filtered == (0, 2)
    assert how.has_greedy
    assert not table.sampling(np.array([plain]), torch.device("cpu")).has_greedy


def test_a_full_table_has_no_slot():
    table = RowTable(1, 4, [])
    table.begin(1, SamplingParams(max_new_tokens=1))
    with pytest.raises(IndexError):
        table.begin(2, SamplingParams(max_new_tokens=1))

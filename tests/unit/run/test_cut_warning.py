"""Where most conversations are cut, a run says so before it trains on what is left of them."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.data.report import DataReport
from laurel.run.reward_model import tokenise


@pytest.mark.parametrize(("num_cut", "is_told"), [(3, True), (2, False)])
def test_most_being_cut_is_a_warning(num_cut, is_told):
    tokens = [
        SimpleNamespace(truncated_G=(i < num_cut, i + 1 < num_cut), lengths_G=(8, 8))
        for i in (0, 2)
    ]
    contract: Any = SimpleNamespace(
        encode=lambda groups, sources: tokens, rules=SimpleNamespace(max_length=8)
    )
    preferences: Any = [SimpleNamespace(group=None, source=str(i)) for i in range(2)]
    stream = io.StringIO()
    report = DataReport(name="train")
    tokenise(
        preferences, contract, report, overlong="truncate", console=Console(file=stream, width=300)
    )
    assert report.num_truncated == num_cut
    said = f"warning: train: {num_cut} of 4 conversations cut to 8 tokens"
    assert (said in stream.getvalue()) == is_told
    assert ("policy.max_total_sequence_length" in stream.getvalue()) == is_told
